-- Every migration opens with these two statements, and they name no Instance: the
-- schema is the one the connection's search_path selects, its owner the role that
-- bootstrap.sql made, and from here on everything is made by that role in that schema.
set local lock_timeout = '5s';

do $$
declare
    v_schema text    := current_schema();
    v_sound  boolean := true;
    v_owner  text    := (
        select pg_get_userbyid(n.nspowner)
        from pg_namespace as n
        where n.nspname = current_schema()
    );
begin
    -- What a connection that names no Instance has in its search_path is not to be
    -- trusted with a function call.
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Outside a transaction the first statement, and all that is set below, is
    -- forgotten at once, and the rest would be made by the connected role.
    if current_setting('lock_timeout') <> '5s' then
        raise exception using errcode = 'LJ008',
            message = 'a migration must be applied in one transaction',
            hint    = 'With psql: -1 -v ON_ERROR_STOP=1.';
    end if;

    if (
        select count(*) = 4
        from pg_roles as r
        where right(v_owner, 6) = '_owner'
          and r.rolname in (
              left(v_owner, -6) || '_producer', left(v_owner, -6) || '_worker',
              left(v_owner, -6) || '_observer', left(v_owner, -6) || '_operator'
          )
    ) is not true then
        raise exception using errcode = 'LJ008',
            message = format('schema %s is not a Jobs Instance', v_schema),
            hint    = 'Run sql/bootstrap.sql first, and name the Instance''s schema '
                      'in the URL: ?schema=<schema>.';
    end if;

    -- A second session that applies migrations to this Instance waits here, whether or
    -- not it respects the migration tool's own lock.
    perform pg_advisory_xact_lock(
        hashtextextended('lenso-jobs migration ' || v_schema, 0)
    );
    perform set_config('search_path', format('%I, pg_temp', v_schema), true);
    perform set_config('role', v_owner, true);
    -- Files are loaded by name, and a function may call one that comes later.
    perform set_config('check_function_bodies', 'off', true);

    -- For 9_seal.sql, before anything changes. In an empty schema nothing is unsound.
    begin
        if exists (
            select from pg_class as c
            where c.relnamespace = v_schema::regnamespace
                and c.relname !~ '^_?yoyo_'
        ) then
            v_sound := (select d.digest from installed_digest as d) = _catalogue_digest();
        end if;
    exception when others then
        v_sound := false;
    end;
    perform set_config('lenso_jobs.was_sound', coalesce(v_sound, false)::text, true);
end $$;
