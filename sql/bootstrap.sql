-- Run by a DBA before the first migration, and again whenever the callers change: it
-- makes the schema, the Instance's roles and the callers' memberships, and nothing else.
-- It takes the configuration document from a setting, in psql for example
--
--   \set document `cat jobs.json`
--   select set_config('lenso_jobs.document', :'document', false);
--   \i sql/bootstrap.sql
--
-- and may be run any number of times. A role that exists is used as it is: its
-- password, attributes and other memberships are never touched.
do $$
declare
    v_document jsonb := nullif(current_setting('lenso_jobs.document', true), '');
    v_schema   text  := v_document ->> 'schema';
    v_prefix   text  := coalesce(v_document ->> 'role_prefix', v_schema);
    v_kinds    text[] := array['owner', 'producer', 'worker', 'observer', 'operator'];
    v_is_super boolean := (select r.rolsuper from pg_roles as r where r.rolname = current_user);
    v_inherit  text := case when current_setting('server_version_num')::integer >= 160000
                           then ' with inherit true' else '' end;
    v_owner    text;
    v_kind     text;
    v_role     text;
    v_group    text;
begin
    if v_document is null then
        raise exception using
            errcode = 'LJ007',
            message = 'the setting lenso_jobs.document holds no configuration',
            hint    = 'Set it to the Instance''s JSON document first.';
    end if;
    if current_setting('server_version_num')::integer < 150000 then
        raise exception using
            errcode = 'LJ007', message = 'PostgreSQL 15 or newer is needed';
    end if;
    if current_setting('server_encoding') <> 'UTF8' then
        raise exception using
            errcode = 'LJ007',
            message = 'the database must be encoded in UTF8',
            hint    = 'create database ... encoding ''UTF8'' template template0';
    end if;
    if (v_schema ~ '^[a-z][a-z0-9_]{0,47}$' and v_schema !~ '^pg_'
        and v_schema not in ('public', 'information_schema')) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'schema must match ^[a-z][a-z0-9_]{0,47}$ and be none of PostgreSQL''s';
    end if;
    if (v_prefix ~ '^[a-z][a-z0-9_]{0,47}$' and v_prefix !~ '^pg_'
        and v_prefix not in ('public', 'information_schema')) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'role_prefix must match ^[a-z][a-z0-9_]{0,47}$ and be none of '
                      'PostgreSQL''s';
    end if;
    v_owner := v_prefix || '_owner';

    -- The callers, before anything is made. A group of any Instance on this server is
    -- known by its name and its four siblings.
    for v_role in
        select distinct c.value
        from unnest(array['producer_instances', 'worker_instances', 'observer_instances'])
            as f (field)
        cross join jsonb_array_elements_text(
            coalesce(v_document -> f.field, '[]')
        ) as c
    loop
        if octet_length(v_role) not between 1 and 63
            or lower(v_role) in ('none', 'public')
            or lower(v_role) like 'pg@_%' escape '@' then
            raise exception using
                errcode = 'LJ007',
                message = format('%I cannot be a caller Instance', v_role),
                hint    = 'A caller is a role name of 1 to 63 bytes, not none, public or '
                          'pg_*.';
        end if;
        if exists (select from pg_roles as r where r.rolname = v_role and r.rolsuper) then
            raise exception using
                errcode = 'LJ007',
                message = format('%I is a superuser and cannot be a caller Instance', v_role);
        end if;
        v_group := substring(v_role from '^(.*)_(?:owner|producer|worker|observer|operator)$');
        if v_group = v_prefix
            or (
                select count(*) = 5
                from pg_roles as r
                where r.rolname = any (array(select v_group || '_' || k from unnest(v_kinds) as k))
            ) then
            raise exception using
                errcode = 'LJ007',
                message = format('%I is an Instance''s own role and cannot be a caller', v_role);
        end if;
    end loop;

    -- One bootstrap of this Instance at a time.
    perform pg_advisory_xact_lock(hashtextextended('lenso-jobs bootstrap ' || v_schema, 0));

    foreach v_kind in array v_kinds loop
        v_role := v_prefix || '_' || v_kind;
        if exists (select from pg_roles as r where r.rolname = v_role and r.rolsuper) then
            raise exception using
                errcode = 'LJ007',
                message = format('%I is a superuser', v_role),
                hint    = 'Set role_prefix to a name of the Instance''s own.';
        end if;
        begin
            if to_regrole(format('%I', v_role)) is null then
                execute format('create role %I nologin', v_role);
            end if;
        exception when duplicate_object or unique_violation then
            null;  -- made by a bootstrap in another database at this moment
        end;
    end loop;

    -- Roles belong to the whole server. The comment is where two databases that reach
    -- for the same roles meet: one waits for the other, fails, and finds them taken
    -- when it is run again.
    begin
        if shobj_description(v_owner::regrole, 'pg_authid') is distinct from
            format('owns the Jobs Instance %s in database %s', v_schema, current_database())
        then
            execute format(
                'comment on role %I is %L', v_owner,
                format('owns the Jobs Instance %s in database %s', v_schema, current_database())
            );
        end if;
    exception when insufficient_privilege then
        null;  -- the roles were made beforehand, by somebody else
    end;
    for v_role in
        select v_prefix || '_' || k from unnest(v_kinds) as k
    loop
        if exists (
            select
            from pg_shdepend as d
            where
                d.refclassid = 'pg_authid'::regclass
                and d.refobjid = v_role::regrole
                and (
                    d.dbid not in (
                        0, (select b.oid from pg_database as b where b.datname = current_database())
                    )
                    or d.classid = 'pg_namespace'::regclass
                    and d.dbid <> 0
                    and d.objid <> coalesce(to_regnamespace(format('%I', v_schema)), 0)
                )
        ) then
            raise exception using
                errcode = 'LJ007',
                message = format('role %I belongs to another Jobs Instance or database', v_role),
                hint    = 'Set role_prefix in the document: the callers of one could '
                          'otherwise act in the other.';
        end if;
        if exists (
            select
            from unnest(v_kinds) as k
            where
                v_prefix || '_' || k <> v_role
                and pg_has_role(v_role, v_prefix || '_' || k, 'member')
        ) then
            raise exception using
                errcode = 'LJ007',
                message = format('role %I is a member of another role of the Instance', v_role),
                hint    = 'Revoke that membership: it would merge their rights.';
        end if;
    end loop;

    -- From 16 on the maker of a role may hand it out, but neither use nor become it.
    if not v_is_super and not (
        pg_has_role(v_owner, 'usage') and pg_has_role(v_owner, 'member')
    ) then
        execute format(
            'grant %I to current_user%s', v_owner,
            case when v_inherit <> '' then v_inherit || ', set true' else '' end
        );
    end if;

    if to_regnamespace(format('%I', v_schema)) is null then
        execute format('create schema %I authorization %I', v_schema, v_owner);
    elsif not exists (
        select from pg_namespace as n
        where n.nspname = v_schema and n.nspowner = v_owner::regrole
    ) then
        raise exception using
            errcode = 'LJ007',
            message = format('schema %I exists and is not owned by %I', v_schema, v_owner),
            hint    = 'Choose another schema, or set role_prefix as it was at setup.';
    end if;

    -- Memberships: what the document declares and no more.
    foreach v_kind in array array['producer', 'worker', 'observer'] loop
        v_group := v_prefix || '_' || v_kind;
        for v_role in
            select c.value
            from jsonb_array_elements_text(
                coalesce(v_document -> (v_kind || '_instances'), '[]')
            ) as c
        loop
            begin
                if to_regrole(format('%I', v_role)) is null then
                    execute format('create role %I nologin', v_role);
                end if;
            exception when duplicate_object or unique_violation then
                null;
            end;
            if not exists (
                select
                from pg_auth_members as m
                where
                    m.roleid = v_group::regrole
                    and m.member = (
                        select r.oid from pg_roles as r where r.rolname = v_role
                    )
                    and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)
            ) then
                execute format('grant %I to %I%s', v_group, v_role, v_inherit);
            end if;
        end loop;
    end loop;

    -- Taken back from those who were declared and are no longer; a membership that
    -- somebody else granted is theirs.
    if to_regclass(format('%I.caller', v_schema)) is not null then
        for v_group, v_role in
            execute format(
                'select g.name, c.caller'
                ' from %1$I.caller as c'
                ' cross join lateral (values'
                '     (%2$L, c.is_producer, $1 -> ''producer_instances''),'
                '     (%3$L, c.is_worker, $1 -> ''worker_instances''),'
                '     (%4$L, c.is_observer, $1 -> ''observer_instances'')'
                ' ) as g (name, was_declared, declared)'
                ' where g.was_declared and not coalesce(g.declared, ''[]'') ? c.caller'
                '     and exists (select from pg_roles as r where r.rolname = c.caller)',
                v_schema,
                v_prefix || '_producer', v_prefix || '_worker', v_prefix || '_observer'
            )
            using v_document
        loop
            execute format('revoke %I from %I', v_group, v_role);
        end loop;
    end if;
end $$;
