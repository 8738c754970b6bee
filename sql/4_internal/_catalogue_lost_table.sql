-- Asked before anything is read: what reads a table that is gone fails. The names are
-- looked for in the Instance's schema alone, and not among a caller's temporary tables.
create or replace function _catalogue_lost_table()
returns table (subject text, detail text)
language sql stable as $$
    select
        case when t.name = any(_catalogue_tables()) then 'table ' else 'view ' end || t.name,
        case
            when c.oid is null then 'is missing'
            when row_security_active(c.oid) then 'hides rows: its row security is on'
            else 'is lost: the Instance''s owner has lost its own table'
        end
    from unnest(
        _catalogue_tables() || array['health_finding', 'explain_reason']
    ) as t (name)
    cross join lateral (
        select to_regclass(format('%I.%I', current_schema(), t.name))::oid
    ) as c (oid)
    where not coalesce(has_table_privilege(c.oid, 'select'), false)
        or row_security_active(c.oid)
        or (
            t.name = any(_catalogue_tables())
            and not (
                has_table_privilege(c.oid, 'insert')
                and has_table_privilege(c.oid, 'update')
                and has_table_privilege(c.oid, 'delete')
            )
        )
    limit 1
$$;
comment on function _catalogue_lost_table() is
'One of the tables and views that the reads need, and that is missing or that the '
'owner may not use in full; no row while all are there.';
