-- Run by a DBA before the first migration, and again, before configure, whenever the
-- callers change. It makes the schema, the Instance's roles and the callers'
-- memberships, takes a membership back from a caller that is no longer declared, makes
-- whoever runs it a member of the owner unless that is a superuser, and says in the
-- owner's comment which database it belongs to. It takes the configuration document
-- from a setting, in psql for example
--
--   \set document `cat jobs.json`
--   select set_config('lenso_jobs.document', :'document', false);
--   \i sql/bootstrap.sql
--
-- and may be run any number of times. A role that exists is used as it is: its
-- password, attributes and other memberships are never touched.
do $$
declare
    v_path     text := pg_catalog.current_setting('search_path');
    v_document jsonb;
    v_schema   text;
    v_prefix   text;
    v_owner    text;
    v_claim    text;
    v_version  integer;
    v_here     oid;
    v_kinds    text[] := array['owner', 'producer', 'worker', 'observer', 'operator'];
    v_inherit  text;
    v_kind     text;
    v_role     text;
    v_where    text;
    v_group    text;
    v_grantor  text;
    v_revoke   text;
begin
    -- Before anything else is called: whoever may create in a schema of the DBA's own
    -- search_path could put a closer match in front of PostgreSQL's functions.
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    v_document := nullif(current_setting('lenso_jobs.document', true), '');
    v_schema := v_document ->> 'schema';
    v_prefix := coalesce(v_document ->> 'role_prefix', v_schema);
    v_owner := v_prefix || '_owner';
    v_version := current_setting('server_version_num')::integer;
    v_here := (select d.oid from pg_database as d where d.datname = current_database());
    v_claim := format(
        'owns the Jobs Instance %s in database %s', v_schema, current_database()
    );
    if v_document is null then
        raise exception using
            errcode = 'LJ007',
            message = 'the setting lenso_jobs.document holds no configuration',
            hint    = 'Set it to the Instance''s JSON document first.';
    end if;
    if v_version < 150000 then
        raise exception using
            errcode = 'LJ007',
            message = 'PostgreSQL 15 or newer is needed';
    end if;
    if current_setting('server_encoding') <> 'UTF8' then
        raise exception using
            errcode = 'LJ007',
            message = 'the database must be encoded in UTF8',
            hint    = 'create database ... encoding ''UTF8'' template template0';
    end if;
    foreach v_role in array array[v_schema, v_prefix] loop
        if (
            v_role ~ '^[a-z][a-z0-9_]{0,47}$'
            and left(v_role, 3) <> 'pg_'
            and v_role not in ('public', 'information_schema')
        ) is not true then
            raise exception using
                errcode = 'LJ007',
                message = 'schema and role_prefix must match ^[a-z][a-z0-9_]{0,47}$',
                hint    = 'Nor may they be public, information_schema or pg_*.';
        end if;
    end loop;

    -- The callers, before anything is made. A group of any Instance on this server is
    -- known by its name and its four siblings.
    for v_role in
        select distinct c.value
        from unnest(array[
            'producer_instances', 'worker_instances', 'observer_instances'
        ]) as f (field)
        cross join jsonb_array_elements_text(coalesce(v_document -> f.field, '[]')) as c
    loop
        if octet_length(v_role) not between 1 and 63
            or lower(v_role) in ('none', 'public')
            or left(lower(v_role), 3) = 'pg_' then
            raise exception using
                errcode = 'LJ007',
                message = format('%I cannot be a caller Instance', v_role),
                hint    = 'A caller is a role name of 1 to 63 bytes, and none of none, '
                          'public and pg_*.';
        end if;
        if (select r.rolsuper from pg_roles as r where r.rolname = v_role) then
            raise exception using
                errcode = 'LJ007',
                message = format('%I is a superuser and cannot be a caller', v_role);
        end if;
        v_group := substring(
            v_role from '^(.*)_(?:' || array_to_string(v_kinds, '|') || ')$'
        );
        if v_version < 160000
            and (select not r.rolinherit from pg_roles as r where r.rolname = v_role)
        then
            raise exception using
                errcode = 'LJ007',
                message = format('%I does not inherit what it is a member of', v_role),
                hint    = format('alter role %I inherit', v_role);
        end if;
        if v_group = v_prefix or (
            select count(*) = 5
            from unnest(v_kinds) as k
            join pg_roles as r on r.rolname = v_group || '_' || k
        ) then
            raise exception using
                errcode = 'LJ007',
                message = format('%I is an Instance''s own role, not a caller', v_role);
        end if;
    end loop;

    -- One bootstrap of this Instance at a time.
    perform pg_advisory_xact_lock(
        hashtextextended('lenso-jobs bootstrap ' || v_schema, 0)
    );

    foreach v_kind in array v_kinds loop
        v_role := v_prefix || '_' || v_kind;
        if (select r.rolsuper from pg_roles as r where r.rolname = v_role) then
            raise exception using
                errcode = 'LJ007',
                message = format('%I is a superuser', v_role),
                hint    = 'Set role_prefix in the document to a name of its own.';
        end if;
        if v_kind = 'owner'
            and (select r.rolcanlogin from pg_roles as r where r.rolname = v_role) then
            raise exception using
                errcode = 'LJ007',
                message = format('%I can log in', v_role),
                hint    = format(
                    'Whoever does owns the Instance: alter role %I nologin, or set '
                    'role_prefix in the document.', v_role
                );
        end if;
        begin
            if to_regrole(v_role) is null then
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
        if v_claim is distinct from shobj_description(v_owner::regrole, 'pg_authid')
        then
            execute format('comment on role %I is %L', v_owner, v_claim);
        end if;
    exception when insufficient_privilege then
        null;  -- the roles were made beforehand, by somebody else
    end;
    foreach v_kind in array v_kinds loop
        v_role := v_prefix || '_' || v_kind;
        v_where := (
            select
                case when d.dbid = v_here then format('schema %I', n.nspname)
                else format('database %I', b.datname) end
            from pg_shdepend as d
            join pg_database as b on b.oid = d.dbid
            left join pg_namespace as n on d.dbid = v_here and n.oid = d.objid
            where
                d.refclassid = 'pg_authid'::regclass
                and d.refobjid = v_role::regrole
                and (
                    d.dbid <> v_here and not b.datistemplate
                    or d.classid = 'pg_namespace'::regclass
                    and d.objid is distinct from to_regnamespace(v_schema)
                )
            order by 1
            limit 1
        );
        if v_where is not null then
            raise exception using
                errcode = 'LJ007',
                message = format(
                    'role %I belongs to another Instance: it owns or may do something '
                    'in %s', v_role, v_where
                ),
                hint    = 'Set role_prefix in the document: the callers of one could '
                          'otherwise act in the other. If there is no other Instance, '
                          'revoke it there.';
        end if;
        -- The owner may see how long other sessions' transactions have been open.
        if exists (
            select
            from pg_auth_members as m
            where
                m.member = v_role::regrole
                and not (v_kind = 'owner' and m.roleid = 'pg_read_all_stats'::regrole)
        ) then
            raise exception using
                errcode = 'LJ007',
                message = format('role %I is a member of another role', v_role),
                hint    = 'Revoke that membership, or set role_prefix in the document: '
                          'the callers would have its rights too.';
        end if;
    end loop;

    -- From 16 on the maker of a role may hand it out, but neither use nor become it.
    v_inherit := case when v_version >= 160000 then ' with inherit true' else '' end;
    if not pg_has_role(v_owner, 'usage') then
        execute format(
            'grant %I to current_user%s', v_owner,
            case when v_version >= 160000 then v_inherit || ', set true' else '' end
        );
    end if;

    if to_regnamespace(v_schema) is null then
        execute format('create schema %I authorization %I', v_schema, v_owner);
    elsif not exists (
        select
        from pg_namespace as n
        where n.nspname = v_schema and n.nspowner = v_owner::regrole
    ) then
        raise exception using
            errcode = 'LJ007',
            message = format('schema %I exists and is not %I''s', v_schema, v_owner),
            hint    = 'Choose another schema, or the role_prefix it was set up with.';
    end if;

    -- Every declared caller becomes a member. From 16 on a membership may be there
    -- that inherits nothing: the role's maker has one.
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
                null;  -- as above
            end;
            if not exists (
                select
                from pg_auth_members as m
                join pg_roles as r on r.oid = m.member
                where
                    m.roleid = v_group::regrole
                    and r.rolname = v_role
                    and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)
            ) then
                execute format('grant %I to %I%s', v_group, v_role, v_inherit);
            end if;
        end loop;
    end loop;

    -- Taken back from those who were declared and are no longer, whoever granted it;
    -- from 16 on each grant is its grantor's. Who was never declared keeps what somebody
    -- gave them.
    if to_regclass(v_schema || '.caller') is not null then
        for v_group, v_role, v_grantor in
            execute format(
                'select g.rolname, r.rolname, b.rolname'
                ' from %I.caller as c'
                ' cross join lateral (values'
                '     (''producer'', c.is_producer),'
                '     (''worker'', c.is_worker),'
                '     (''observer'', c.is_observer)'
                ' ) as k (kind, was_declared)'
                ' join pg_roles as r on r.rolname = c.caller'
                ' join pg_roles as g on g.rolname = %L || ''_'' || k.kind'
                ' join pg_auth_members as m on m.roleid = g.oid and m.member = r.oid'
                ' join pg_roles as b on b.oid = m.grantor'
                ' where k.was_declared'
                '     and coalesce((to_jsonb(m) ->> ''inherit_option'')::boolean, true)'
                '     and not coalesce($1 -> (k.kind || ''_instances''), ''[]'')'
                '         ? c.caller', v_schema, v_prefix
            )
            using v_document
        loop
            v_revoke := format(
                'revoke %I from %I%s', v_group, v_role,
                case when v_version >= 160000 then format(' granted by %I', v_grantor)
                else '' end
            );
            begin
                execute v_revoke;
            exception when insufficient_privilege then
                raise exception using
                    errcode = '42501',
                    message = format(
                        '%I was granted to %I by %I', v_group, v_role, v_grantor
                    ),
                    hint    = format('Have that role, or a superuser, run: %s', v_revoke);
            end;
        end loop;
    end if;
    perform set_config('search_path', v_path, true);
end $$;
