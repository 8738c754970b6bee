create or replace function _faults_of_objects()
returns table (finding text, subject text, since timestamptz, detail text)
language plpgsql
stable
as $$
begin
    return query
    select
        case
            when kind = 'grant' and o.name is null then 'grant_missing'
            when kind = 'grant' then 'grant_stray'
            when i.name is null then 'object_stray'
            when kind = 'index' then 'index_unusable'
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
        )
        -- The columns of a table that is none of the Instance's are told with it.
        and (
            kind <> 'column'
            or split_part(name, '.', 1) in (
                select t.name
                from installed_object as t
                where t.kind = 'table'
            )
        )
        -- An index that is being built, concurrently, or built anew beside the old one.
        and (
            kind <> 'index'
            or i.name is not null
            or o.digest <> 'broken'
            or not exists (
                select
                from pg_locks as l
                join pg_stat_activity as s on s.pid = l.pid
                join pg_index as x on x.indrelid = l.relation
                join pg_class as c on c.oid = x.indexrelid
                where
                    c.relnamespace = current_schema()::regnamespace
                    and c.relname = name
                    and l.mode = 'ShareUpdateExclusiveLock'
                    and s.datname = current_database()
                    -- Autovacuum is nobody's.
                    and s.usesysid is not null
            )
        );
end;
$$;
comment on function _faults_of_objects() is
'Differences between what was installed and what is there, for inspect_health.';
