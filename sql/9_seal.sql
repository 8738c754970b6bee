-- What the Instance is made of, for inspect_health to compare with. Grants to others
-- than its own groups are never part of it.
delete from installed_object;
insert into installed_object (kind, name, digest)
select o.kind, o.name, o.digest
from _objects() as o
where
    o.kind <> 'grant'
    or substring(o.name from ' to (.*)$') in (
        select left(pg_get_userbyid(n.nspowner), -6) || '_' || g.kind
        from pg_namespace as n
        cross join unnest(
            array['producer', 'worker', 'observer', 'operator']
        ) as g (kind)
        where n.nspname = current_schema()
    );
