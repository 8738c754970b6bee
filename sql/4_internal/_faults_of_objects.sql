create or replace function _faults_of_objects()
returns table (finding text, subject text, since timestamptz, detail text)
language plpgsql
stable
as $$
begin
    return query
    select
        case
            when kind = 'index' then 'index_unusable'
            when kind = 'grant' and o.name is null then 'grant_missing'
            when kind = 'grant' then 'grant_stray'
            when i.name is null then 'object_stray'
            when kind = 'constraint' then 'constraint_missing'
            else 'object_changed'
        end,
        case kind when 'grant' then name else kind || ' ' || name end,
        null::timestamptz,
        case
            when i.name is null then 'is not part of the Instance'
            when o.name is null then 'is missing'
            else 'is not as it was installed'
        end
    from installed_object as i
    full join _objects() as o using (kind, name)
    where
        i.digest is distinct from o.digest
        -- What a role that is gone has lost is told as role_missing.
        and (
            kind <> 'grant'
            or o.name is not null
            or substring(name from ' to (.*)$') in (select r.rolname from pg_roles as r)
        );
end;
$$;
comment on function _faults_of_objects() is
'Differences between what was installed and what is there, for inspect_health.';
