-- The digest of what a dump and another server version leave as it is; check compares
-- everything else.
create or replace function _objects()
returns table (kind text, name text, digest text)
language sql
stable
set quote_all_identifiers = off
as $$
    with home as (
        select n.oid, n.nspowner
        from pg_namespace as n
        where n.nspname = current_schema()
    ),
    relation as (
        select c.*
        from pg_class as c
        join home as h on h.oid = c.relnamespace
        where c.relname !~ '^_?yoyo_'
    )
    select
        'function', p.oid::regprocedure::text,
        md5(concat_ws(
            '|', p.prosrc, p.prosecdef, p.provolatile, p.proisstrict, p.proparallel,
            p.prorettype::regtype,
            p.proowner = h.nspowner,
            array(select c.setting from unnest(p.proconfig) as c (setting) order by 1)
        ))
    from pg_proc as p
    join home as h on h.oid = p.pronamespace
    union all
    select
        case r.relkind when 'v' then 'view' when 'S' then 'sequence' else 'table' end,
        r.relname::text,
        -- Row security that is forced hides every row from the functions.
        concat(r.relpersistence, r.relrowsecurity and r.relforcerowsecurity)
    from relation as r
    where r.relkind in ('r', 'v', 'S', 'm', 'p', 'f')
    union all
    select
        'column', r.relname || '.' || t.attname,
        concat(format_type(t.atttypid, t.atttypmod), t.attnotnull, t.attidentity)
    from pg_attribute as t
    join relation as r on r.oid = t.attrelid
    where r.relkind = 'r' and t.attnum > 0 and not t.attisdropped
    union all
    select 'trigger', r.relname || '.' || t.tgname, concat(t.tgenabled, t.tgtype)
    from pg_trigger as t
    join relation as r on r.oid = t.tgrelid
    where not t.tgisinternal
    union all
    select 'rule', r.relname || '.' || w.rulename, w.ev_enabled::text
    from pg_rewrite as w
    join relation as r on r.oid = w.ev_class
    where w.rulename <> '_RETURN'
    union all
    select
        'index', r.relname::text,
        case when i.indisvalid and i.indisready then concat_ws(
            '|', i.indisunique, i.indpred is null, i.indoption,
            array(
                select t.attname
                from unnest(i.indkey::smallint[]) with ordinality as k (attnum, place)
                join pg_attribute as t
                    on t.attrelid = i.indrelid and t.attnum = k.attnum
                order by k.place
            )
        ) else 'broken' end
    from pg_index as i
    join relation as r on r.oid = i.indexrelid
    union all
    select
        'constraint', coalesce(r.relname, t.typname) || '.' || k.conname,
        k.convalidated::text
    from pg_constraint as k
    join home as h on h.oid = k.connamespace
    left join relation as r on r.oid = k.conrelid
    left join pg_type as t on t.oid = k.contypid
    where k.contype in ('p', 'u', 'c', 'x') and num_nonnulls(r.oid, t.oid) > 0
    union all
    select
        'grant',
        format(
            '%s on %s to %s', lower(a.privilege_type), o.name,
            case a.grantee when 0 then 'public' else pg_get_userbyid(a.grantee) end
        ),
        ''
    from home as h
    cross join lateral (
        select 'the schema', n.nspacl from pg_namespace as n where n.oid = h.oid
        union all
        select p.oid::regprocedure::text, coalesce(p.proacl, acldefault('f', p.proowner))
        from pg_proc as p
        where p.pronamespace = h.oid
        union all
        select r.relname::text, r.relacl
        from relation as r
        union all
        select r.relname || '.' || t.attname, t.attacl
        from relation as r
        join pg_attribute as t on t.attrelid = r.oid
        where t.attacl is not null
        union all
        select 'type ' || t.typname, coalesce(t.typacl, acldefault('T', t.typowner))
        from pg_type as t
        left join relation as r on r.oid = t.typrelid
        where
            t.typnamespace = h.oid
            and (t.typtype = 'd' or (t.typtype = 'c' and r.relkind = 'c'))
    ) as o (name, acl)
    cross join lateral aclexplode(o.acl) as a
    where a.grantee <> h.nspowner
$$;
comment on function _objects() is
'What the schema holds, as installed_object keeps it: functions, tables, columns, '
'views, triggers, rules, indexes, constraints, and every grant to another role than '
'the owner.';
