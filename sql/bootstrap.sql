-- A DBA runs this script before the first migration, and again before configure
-- whenever the callers change. From the Instance's document it
--
--   1. refuses callers and group roles that would open the Instance,
--   2. creates the group roles, the callers and the schema that do not exist,
--   3. makes the callers members of their groups,
--   4. revokes the memberships of callers that the document no longer declares,
--   5. makes the current user a member of the owner, unless it is a superuser.
--
-- The document is read from a setting, for example in psql:
--
--   \set document `cat jobs.json`
--   select set_config('lenso_jobs.document', :'document', false);
--   \i sql/bootstrap.sql
--
-- It can be run any number of times. The password, the attributes and the other
-- memberships of an existing role are never changed. Where the setting
-- lenso_jobs.memberships is 'off', the callers and their memberships are left as they
-- are: upgrade --repair creates the group roles alone.
do $$
declare
    v_path      text    := pg_catalog.current_setting('search_path');
    v_version   integer := pg_catalog.current_setting('server_version_num');
    v_is_repair boolean;
    v_suffixes  text    := '_(owner|producer|worker|observer|operator)$';
    v_document  jsonb;
    v_schema    text;
    v_prefix    text;
    v_owner     text;
    v_claim     text;
    v_groups    text[];
    v_callers   text[];
    v_inherit   text;
    v_refusal   text;
    v_hint      text;
    v_role      text;
    v_change    text;
begin
    -- First of all: in the search_path of the session another schema could come
    -- before pg_catalog, with functions that match more closely.
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    v_is_repair := coalesce(current_setting('lenso_jobs.memberships', true) = 'off', false);
    v_document := nullif(current_setting('lenso_jobs.document', true), '');
    v_schema := v_document ->> 'schema';
    v_prefix := coalesce(v_document ->> 'role_prefix', v_schema);
    v_owner := v_prefix || '_owner';
    v_groups := array[
        v_owner, v_prefix || '_producer', v_prefix || '_worker',
        v_prefix || '_observer', v_prefix || '_operator'
    ];
    v_claim := format(
        'owns the Jobs Instance %s in database %s', v_schema, current_database()
    );
    v_callers := array(
        select distinct c.value
        from unnest(array['producer', 'worker', 'observer']) as k (kind)
        cross join jsonb_array_elements_text(
            coalesce(v_document -> (k.kind || '_instances'), '[]')
        ) as c
    );

    -- Before anything is created. A group role of another Instance is recognised by its
    -- name and by the four other groups beside it.
    with refusal (place, name, message, hint) as (
        select v.place, null, v.message, v.hint
        from (
            values
                (1, v_document is null,
                'the setting lenso_jobs.document holds no configuration',
                'Set it to the Instance''s JSON document first.'),
                (2, v_version < 150000, 'the server is older than PostgreSQL 15', null),
                (3, current_setting('server_encoding') <> 'UTF8',
                'the encoding of the database is not UTF8',
                'create database ... encoding ''UTF8'' template template0')
        ) as v (place, is_so, message, hint)
        where v.is_so
        union all
        select 4, null, 'schema and role_prefix must match ^[a-z][a-z0-9_]{0,47}$',
            'The names public, information_schema and pg_* are refused too.'
        from unnest(array[v_schema, v_prefix]) as n (name)
        where (
            n.name ~ '^[a-z][a-z0-9_]{0,47}$'
            and left(n.name, 3) <> 'pg_'
            and n.name not in ('public', 'information_schema')
        ) is not true
        union all
        select 5, c.name, f.message, f.hint
        from unnest(v_callers) as c (name)
        left join pg_roles as r on r.rolname = c.name
        cross join lateral (
            select c.name ~ v_suffixes and count(*) = 5
            from pg_roles as o
            where o.rolname ~ v_suffixes
                and regexp_replace(o.rolname, v_suffixes, '')
                = regexp_replace(c.name, v_suffixes, '')
        ) as g (is_family)
        cross join lateral (
            values
                (octet_length(c.name) not between 1 and 63
                or lower(c.name) in ('none', 'public') or left(lower(c.name), 3) = 'pg_',
                format('%I cannot be a caller Instance', c.name),
                'A caller is a role name of 1 to 63 bytes. The names none, public and '
                'pg_* are refused.'),
                (r.rolsuper,
                format('%I is a superuser and cannot be a caller', c.name), null),
                (v_version < 160000 and not r.rolinherit,
                format('%I does not inherit the rights of its groups', c.name),
                format('alter role %I inherit', c.name)),
                (c.name = any (v_groups) or g.is_family,
                format('%I is an Instance''s own role, not a caller', c.name), null)
        ) as f (is_so, message, hint)
        where f.is_so
    )
    select r.message, r.hint
    into v_refusal, v_hint
    from refusal as r
    order by r.place, r.name
    limit 1;
    if v_refusal is not null then
        raise exception using
            errcode = 'LJ007', message = v_refusal, hint = coalesce(v_hint, '');
    end if;

    -- One bootstrap of this Instance at a time.
    perform pg_advisory_xact_lock(
        hashtextextended('lenso-jobs bootstrap ' || v_schema, 0)
    );

    foreach v_role in array v_groups || case when v_is_repair then '{}' else v_callers end
    loop
        begin
            if to_regrole(quote_ident(v_role)) is null then
                execute format('create role %I nologin', v_role);
            end if;
        exception when duplicate_object or unique_violation then
            null;  -- created by a bootstrap in another database at this moment
        end;
    end loop;

    -- Roles belong to the whole server. Two databases that want the same roles meet at
    -- this comment: one waits for the other, fails, and is refused when it runs again.
    begin
        if v_claim is distinct from shobj_description(v_owner::regrole, 'pg_authid')
        then
            execute format('comment on role %I is %L', v_owner, v_claim);
        end if;
    exception when insufficient_privilege then
        null;  -- somebody else created the roles beforehand
    end;

    with team as (
        select g.place, r.*
        from unnest(v_groups) with ordinality as g (name, place)
        join pg_roles as r on r.rolname = g.name
    ),
    refusal (place, message, hint) as (
        select t.place, format('%I is a superuser', t.rolname),
            'Set role_prefix in the document to another name.'
        from team as t
        where t.rolsuper
        union all
        select t.place, format('%I can log in', t.rolname),
            format(
                'A session of that role could read and change every job. Run: alter '
                'role %I nologin. Or set role_prefix in the document.', t.rolname
            )
        from team as t
        where t.rolname = v_owner and t.rolcanlogin
        union all
        -- A renamed schema still belongs to the owner.
        select 10,
            format(
                'role %I owns schema %I, and schema %s does not exist', v_owner,
                n.nspname, v_schema
            ),
            'If the schema of this Instance was renamed, rename it back. If that schema '
            'is another Instance''s, set role_prefix in the document.'
        from pg_namespace as n
        where n.nspowner = v_owner::regrole and to_regnamespace(v_schema) is null
        union all
        select 10 + t.place,
            format(
                'role %I belongs to another Instance: it owns or may do something in %s',
                t.rolname, case
                    when b.datname = current_database()
                        then format('schema %I', n.nspname)
                    else format('database %I', b.datname)
                end
            ),
            'Set role_prefix in the document, or callers of one Instance could act in '
            'the other. If there is no other Instance, revoke that right.'
        from team as t
        join pg_shdepend as d
            on d.refclassid = 'pg_authid'::regclass and d.refobjid = t.oid
        join pg_database as b on b.oid = d.dbid
        left join pg_namespace as n
            on b.datname = current_database() and n.oid = d.objid
        where b.datname <> current_database() and not b.datistemplate
            or d.classid = 'pg_namespace'::regclass
            and d.objid is distinct from to_regnamespace(v_schema)
        union all
        -- The owner may be a member of pg_read_all_stats: then inspect_health can tell
        -- how long other sessions' transactions have been open.
        select 20, format('role %I is a member of another role', t.rolname),
            'Its members would have the rights of that role too. Revoke the '
            'membership, or set role_prefix in the document.'
        from team as t
        join pg_auth_members as m on m.member = t.oid
        where t.rolname <> v_owner or m.roleid <> 'pg_read_all_stats'::regrole
        union all
        select
            30, format('schema %I exists and does not belong to %I', v_schema, v_owner),
            'Choose another schema, or the role_prefix it was set up with.'
        from pg_namespace as n
        where n.nspname = v_schema and n.nspowner <> v_owner::regrole
    )
    select r.message, r.hint
    into v_refusal, v_hint
    from refusal as r
    order by r.place, r.message
    limit 1;
    if v_refusal is not null then
        raise exception using
            errcode = 'LJ007', message = v_refusal, hint = v_hint;
    end if;

    -- From 16 on the creator of a role may grant it, but has none of its rights.
    v_inherit := case when v_version >= 160000 then ' with inherit true' else '' end;
    if not pg_has_role(v_owner, 'usage') then
        execute format(
            'grant %I to current_user%s', v_owner,
            case when v_version >= 160000 then v_inherit || ', set true' else '' end
        );
    end if;

    if to_regnamespace(v_schema) is null then
        execute format('create schema %I authorization %I', v_schema, v_owner);
    end if;

    if v_is_repair then
        perform set_config('search_path', v_path, true);
        return;
    end if;

    -- From 16 on a membership may exist that inherits nothing: the creator of a role
    -- has one.
    for v_change in
        select
            format(
                'grant %I to %s%s', c.team,
                string_agg(format('%I', c.caller), ', ' order by c.caller), v_inherit
            )
        from (
            select v_prefix || '_' || k.kind as team, d.value as caller
            from unnest(array['producer', 'worker', 'observer']) as k (kind)
            cross join jsonb_array_elements_text(
                coalesce(v_document -> (k.kind || '_instances'), '[]')
            ) as d
            except
            select m.roleid::regrole::text, r.rolname
            from pg_auth_members as m
            join pg_roles as r on r.oid = m.member
            where m.roleid = any (v_groups::regrole[])
                and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)
        ) as c
        group by c.team
    loop
        execute v_change;
    end loop;

    -- Only the memberships of callers that were declared are revoked. Others keep what
    -- a DBA granted to them. From 16 on a grant is revoked in the name of its grantor.
    if to_regclass(v_schema || '.caller') is not null then
        perform set_config(
            'search_path', format('pg_catalog, %I, pg_temp', v_schema), true
        );
        for v_change, v_refusal in
            select
                format(
                    'revoke %I from %s%s', g.rolname, m.names,
                    ' granted by ' || quote_ident(m.grantor)
                ), format('%I was granted to %s by %I', g.rolname, m.names, m.any_grantor)
            from (
                select
                    m.roleid, case when v_version >= 160000 then b.rolname end as grantor,
                    max(b.rolname) as any_grantor,
                    string_agg(format('%I', r.rolname), ', ' order by r.rolname) as names
                from (
                    select k.kind, c.caller
                    from caller as c
                    cross join lateral (
                        values
                            ('producer', c.is_producer), ('worker', c.is_worker),
                            ('observer', c.is_observer)
                    ) as k (kind, was_declared)
                    where k.was_declared
                    except
                    select k.kind, d.value
                    from unnest(array['producer', 'worker', 'observer']) as k (kind)
                    cross join jsonb_array_elements_text(
                        coalesce(v_document -> (k.kind || '_instances'), '[]')
                    ) as d
                ) as c
                join pg_roles as r on r.rolname = c.caller
                join pg_auth_members as m
                    on m.member = r.oid
                    and m.roleid = (v_prefix || '_' || c.kind)::regrole
                join pg_roles as b on b.oid = m.grantor
                where coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, true)
                group by 1, 2
            ) as m
            join pg_roles as g on g.oid = m.roleid
        loop
            begin
                execute v_change;
            exception when insufficient_privilege then
                raise exception using
                    errcode = '42501', message = v_refusal,
                    hint    = format('Have that role, or a superuser, run: %s', v_change);
            end;
        end loop;
    end if;
    perform set_config('search_path', v_path, true);
end $$;
