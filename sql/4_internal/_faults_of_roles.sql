create or replace function _faults_of_roles()
returns table (finding text, subject text, since timestamptz, detail text)
language sql
stable
as $$
    with home as (
        select pg_get_userbyid(n.nspowner)::text as owner
        from pg_class as c
        join pg_namespace as n on n.oid = c.relnamespace
        where c.oid = 'instance'::regclass
    ),
    prefix as (
        select left(h.owner, -6) as name
        from home as h
        where right(h.owner, 6) = '_owner'
    ),
    team as (
        select g.kind, p.name || '_' || g.kind as name, r.oid
        from prefix as p
        cross join unnest(
            array['owner', 'producer', 'worker', 'observer', 'operator']
        ) as g (kind)
        left join pg_roles as r on r.rolname = p.name || '_' || g.kind
    ),
    declared as (
        select c.caller, g.kind
        from caller as c
        cross join lateral (
            values
                ('producer', c.is_producer), ('worker', c.is_worker),
                ('observer', c.is_observer)
        ) as g (kind, is_meant)
        where g.is_meant
    ),
    -- From 16 on whoever made a role administers it, without inheriting anything.
    member as (
        select
            t.kind, t.name as team, r.rolname::text as caller,
            pg_has_role(r.oid, h.owner, 'member') as is_administrator
        from team as t
        cross join home as h
        join pg_auth_members as m on m.roleid = t.oid
        join pg_roles as r on r.oid = m.member
        where
            t.kind in ('producer', 'worker', 'observer')
            and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, r.rolinherit)
    )
    select 'role_missing', t.name, null::timestamptz, 'a group role of this Instance'
    from team as t
    where t.oid is null
    union all
    -- Of a renamed owner the other names cannot be told.
    select
        'role_missing', h.owner, null::timestamptz,
        'owns the Instance, and is not called as its owner is'
    from home as h
    where right(h.owner, 6) <> '_owner'
    union all
    select distinct 'role_missing', d.caller, null::timestamptz, 'a declared caller'
    from declared as d
    where not exists (select from pg_roles as r where r.rolname = d.caller)
    union all
    select
        'membership_missing', d.caller, null::timestamptz,
        'should be a member of ' || t.name
    from declared as d
    join team as t on t.kind = d.kind and t.oid is not null
    join pg_roles as r on r.rolname = d.caller
    where not exists (
        select from member as m where m.caller = d.caller and m.kind = d.kind
    )
    union all
    select
        'membership_stray', m.caller, null::timestamptz, 'is a member of ' || m.team
    from member as m
    where
        not exists (
            select from declared as d where d.caller = m.caller and d.kind = m.kind
        )
        -- Who set it up is a member of the owner, and may have to hand out the groups.
        and not (
            m.is_administrator
            and m.caller not in (select d.caller from declared as d)
        )
$$;
comment on function _faults_of_roles() is
'Missing roles, and memberships that are missing or not declared, for inspect_health.';
