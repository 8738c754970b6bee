create or replace function _catalogue_digest()
returns text language sql stable as $$
    select
        encode(
            sha256(convert_to(string_agg(d.text, ', ' order by d.text), 'UTF8')), 'hex'
        )
    from pg_namespace as n
    cross join _catalogue_objects(n.nspname::text) as o
    cross join lateral (
        select _catalogue_digested(o.kind, o.name, o.facts, pg_get_userbyid(n.nspowner)::text)
        collate "C"
    ) as d (text)
    where n.nspname = current_schema()
$$;
comment on function _catalogue_digest() is
'The SHA-256 of what the tables, functions and types of this Instance are now.';
