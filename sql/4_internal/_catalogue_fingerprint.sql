-- Far cheaper than the digest, and another one after a dump and restore: then the
-- digest decides. Each change of an object writes its row of the catalogue anew.
create or replace function _catalogue_fingerprint()
returns text language plpgsql stable
set enable_seqscan = on
set enable_hashjoin = on
as $$
begin
    return (
        with home as (
            select n.oid, n.xmin as version, n.nspowner as owner,
                left(pg_get_userbyid(n.nspowner), -5) as prefix
            from pg_namespace as n
            where n.nspname = current_schema()
        ),
        relation as (
            select c.oid, c.xmin as version
            from home as h
            join pg_class as c on c.relnamespace = h.oid
            -- Those of a new queue are new, and nobody else has a right on them.
            where not (
                c.relkind = 'S' and c.relowner = h.owner
                and starts_with(c.relname, 'claim_floor_')
                and not exists (
                    select from aclexplode(c.relacl) as a where a.grantee <> c.relowner
                )
            )
        ),
        seen (kind, oid, version) as (
            select 'n', h.oid, h.version::text from home as h
            union all select 'd', 0, d.digest from installed_digest as d
            union all
            select 'role', r.oid, r.rolname
            from home as h
            join pg_roles as r on left(r.rolname, length(h.prefix)) = h.prefix
            union all
            select 'p', p.oid, p.xmin::text
            from home as h
            join pg_proc as p on p.pronamespace = h.oid
            union all
            select 't', t.oid, t.xmin::text
            from home as h
            join pg_type as t on t.typnamespace = h.oid
            union all
            select 'k', k.oid, k.xmin::text
            from home as h
            join pg_constraint as k on k.connamespace = h.oid
            union all select 'r', r.oid, r.version::text from relation as r
            union all
            select 'a', r.oid, a.attnum || ' ' || a.xmin
            from relation as r
            join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0
            union all
            select 'i', r.oid, i.xmin::text
            from relation as r
            join pg_index as i on i.indexrelid = r.oid
            union all
            select 'e', d.oid, d.xmin::text
            from relation as r
            join pg_attrdef as d on d.adrelid = r.oid
            union all
            select 'g', g.oid, g.xmin::text
            from relation as r
            join pg_trigger as g on g.tgrelid = r.oid
            union all
            select 'w', w.oid, w.xmin::text
            from relation as r
            join pg_rewrite as w on w.ev_class = r.oid
            union all
            select 'y', y.oid, y.xmin::text
            from relation as r
            join pg_policy as y on y.polrelid = r.oid
        )
        select
            encode(
                sha256(convert_to(string_agg(s::text, ' ' order by s::text), 'UTF8')), 'hex'
            )
        from seen as s
    );
end;
$$;
comment on function _catalogue_fingerprint() is
'Which versions of its objects this Instance has now: the same while nobody changes '
'one.';
