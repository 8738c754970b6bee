create or replace function _health_roles()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with home as (
        select n.nspowner, pg_get_userbyid(n.nspowner)::text as owner,
            substring(pg_get_userbyid(n.nspowner) from '^(.*)_owner$') as prefix
        from pg_namespace as n
        where n.nspname = current_schema()
    ),
    team as (
        select g.kind, h.prefix || '_' || g.kind as name, g.verb, r.oid,
            r.rolsuper, r.rolcanlogin
        from home as h
        cross join (
            values
                ('owner', null), ('producer', 'enqueue'), ('worker', 'claim'),
                ('observer', 'inspect_health'), ('operator', 'redrive')
        ) as g (kind, verb)
        left join pg_roles as r on r.rolname = h.prefix || '_' || g.kind
        where h.prefix is not null
    ),
    -- A renamed role keeps what it was granted.
    holder as (
        select p.proname, r.rolname
        from home as h
        join pg_proc as p on p.proowner = h.nspowner
        cross join aclexplode(p.proacl) as a
        join pg_roles as r on r.oid = a.grantee
        where r.oid <> p.proowner
    ),
    actor as (
        select c.*, r.oid, r.rolsuper
        from caller as c
        left join pg_roles as r on r.rolname = c.caller
    ),
    declared as (
        select a.caller, a.oid, g.kind, t.oid as team, t.name
        from actor as a
        cross join lateral (
            values
                ('producer', a.is_producer), ('worker', a.is_worker),
                ('observer', a.is_observer)
        ) as g (kind, is_meant)
        left join team as t on t.kind = g.kind
        where g.is_meant
    ),
    -- From 16 on the maker of a role administers it, without inheriting anything.
    membership as (
        select
            m.roleid, g.rolname as of, m.member as oid, r.rolname::text as member, t.kind,
            coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, r.rolinherit)
            as is_inherited,
            format(
                'revoke %I from %I%s', g.rolname, r.rolname,
                case
                    when current_setting('server_version_num')::integer >= 160000
                        then format(' granted by %I', pg_get_userbyid(m.grantor))
                end
            ) as undone
        from pg_auth_members as m
        join pg_roles as g on g.oid = m.roleid
        join pg_roles as r on r.oid = m.member
        left join team as t on t.oid = m.roleid
    )
    select
        'role_missing', t.name, null::timestamptz, 'is a group role and does not exist',
        coalesce(
            (
                select format('alter role %I rename to %I', min(h.rolname), t.name)
                from holder as h
                where h.proname = t.verb
                    and h.rolname not in (select o.name from team as o)
                having count(distinct h.rolname) = 1
            ), 'lenso-jobs setup'
        )
    from team as t
    where t.oid is null
    union all
    select f.*
    from home as h
    left join lateral (
        select left(min(g.rolname), -8) || 'owner' as name
        from holder as g
        where g.proname = 'enqueue' and right(g.rolname, 9) = '_producer'
        having count(distinct g.rolname) = 1
    ) as o on true
    left join pg_roles as r on r.rolname = o.name
    cross join lateral (
        select 'role_missing', h.owner, null::timestamptz,
            'owns the Instance and is not named ' || o.name,
            'alter role ' || quote_ident(h.owner) || ' rename to ' || quote_ident(o.name)
        where r.oid is null
        union all
        -- It was not renamed: the Instance was given to another role.
        select 'object_changed', 'schema ' || current_schema(), null,
            format('belongs to %s, not to %s', h.owner, o.name), 'lenso-jobs check'
        where r.oid is not null
    ) as f
    where h.prefix is null
    union all
    select 'role_missing', a.caller, null, 'is a declared caller and does not exist',
        format(
            'if it was renamed: alter role NEW_NAME rename to %I; if it was dropped: '
            'lenso-jobs setup', a.caller
        )
    from actor as a
    where a.oid is null
    union all
    select 'membership_missing', d.caller, null, 'is not a member of ' || d.name,
        -- Before 16 this is the role's own.
        case
            when exists (
                select from membership as m
                where m.undone !~ ' granted by ' and (m.oid, m.roleid) = (d.oid, d.team)
            ) then format('alter role %I inherit', d.caller)
            else 'lenso-jobs configure'
        end
    from declared as d
    where d.oid is not null and d.team is not null
        and not exists (
            select from membership as m
            where m.is_inherited and (m.oid, m.roleid) = (d.oid, d.team)
        )
    union all
    select 'membership_stray', m.member, null,
        'is a member of ' || m.of || ' and not declared',
        coalesce(
            (
                select
                    format(
                        'if it is %s under a new name, rename it back; else ',
                        string_agg(quote_ident(d.caller), ' or ' order by d.caller)
                    )
                from declared as d
                where d.kind = m.kind and d.oid is null
                having count(*) > 0
            ), ''
        ) || m.undone
    from membership as m
    cross join home as h
    where m.is_inherited and m.kind in ('producer', 'worker', 'observer')
        and not exists (
            select from declared as d where (d.caller, d.kind) = (m.member, m.kind)
        )
        and m.member not in (select t.name from team as t)
        -- The role that set the Instance up may have to hand out the groups.
        and not (
            pg_has_role(m.oid, h.nspowner, 'member')
            and m.member not in (select a.caller from actor as a)
        )
    union all
    select 'membership_stray', m.member, null,
        'is a member of ' || m.of || ' and could not have set the Instance up', m.undone
    from membership as m
    where m.is_inherited and m.kind = 'owner'
        and m.member not in (select t.name from team as t)
        and m.member not in (select a.caller from actor as a)
        and not has_database_privilege(m.oid, current_database(), 'create')
    union all
    select
        'role_unsafe', t.name, null, p.detail, format('alter role %I %s', t.name, p.change)
    from team as t
    cross join lateral (
        values
            (t.rolsuper, 'is a superuser', 'nosuperuser'),
            (t.rolcanlogin, 'can log in', 'nologin')
    ) as p (is_so, detail, change)
    where p.is_so
    union all
    -- The owner may see since when the transactions of other roles are open.
    select 'role_unsafe', t.name, null, 'is a member of ' || m.of, m.undone
    from team as t
    join membership as m on m.oid = t.oid
    where not (t.kind = 'owner' and m.of = 'pg_read_all_stats')
    union all
    select 'role_unsafe', a.caller, null, 'is a caller and a superuser',
        format('alter role %I nosuperuser', a.caller)
    from actor as a
    where a.rolsuper
    union all
    -- Members of the last three read, write or lock every table.
    select 'role_unsafe', a.caller, null,
        concat(
            'is a caller and a member of ', m.of,
            ' through ' || nullif(m.member, a.caller)
        ), m.undone
    from actor as a
    join membership as m on pg_has_role(a.oid, m.oid, 'member')
    where not a.rolsuper
        and (
            m.kind in ('owner', 'operator')
            or m.of in ('pg_read_all_data', 'pg_write_all_data', 'pg_maintain')
        )
    union all
    select distinct 'role_unsafe', t.name, null::timestamptz,
        'owns something or has a right in ' || case d.datname
            when current_database() then format('schema %I', n.nspname)
            else format('database %I', d.datname)
        end,
        'if another Instance is there, set role_prefix in the document; else revoke it there'
    from team as t
    cross join home as h
    join pg_shdepend as s
        on s.refclassid = 'pg_authid'::regclass and s.refobjid = t.oid
    join pg_database as d on d.oid = s.dbid
    left join pg_namespace as n
        on d.datname = current_database()
        and s.classid = 'pg_namespace'::regclass and n.oid = s.objid
    where case d.datname
        when current_database() then n.nspowner <> h.nspowner
        else not d.datistemplate
    end
$$;
comment on function _health_roles() is
'Missing roles, memberships that are missing or not declared, and roles that can do '
'more than they should, for inspect_health and check.';
