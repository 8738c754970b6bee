create or replace function _health_storage()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with kept as (
        select c.relname::text as name, s.last_autovacuum, s.n_live_tup, s.n_dead_tup,
            format('%I.%I', s.schemaname, c.relname) as place,
            pg_relation_size(c.oid) as size,
            exists (
                select from pg_options_to_table(c.reloptions) as o
                -- A cast that a filter protects may be reached before the filter.
                where case
                    when o.option_name = 'autovacuum_enabled'
                        then not o.option_value::boolean
                end
            ) as is_left_out
        from pg_class as c
        join pg_stat_user_tables as s on s.relid = c.oid
        where c.oid in ('job'::regclass, 'live_job'::regclass, 'attempt'::regclass)
    )
    select 'autovacuum_off', v.subject, null::timestamptz, 'is off',
        format('set %s to on in the server''s configuration, and reload that', v.subject)
    from unnest(array['autovacuum', 'track_counts']) as v (subject)
    where current_setting(v.subject) = 'off'
    union all
    select 'autovacuum_off', k.name, null, 'has autovacuum_enabled off',
        format('alter table %s reset (autovacuum_enabled)', k.place)
    from kept as k
    where k.is_left_out
    union all
    -- live_job asks for it at 2,000 dead rows, the others at a fifth of the table.
    select 'autovacuum_behind', k.name, k.last_autovacuum,
        format('has %s dead rows and %s live ones', k.n_dead_tup, k.n_live_tup), null
    from kept as k
    where k.n_dead_tup
        > 50000 + case k.name when 'live_job' then 0 else k.n_live_tup / 2 end
    union all
    select 'table_bloated', k.name, null,
        format('takes %s for %s live rows', pg_size_pretty(k.size), k.n_live_tup), null
    from kept as k
    where k.name = 'live_job' and k.size > 268435456 + 10000 * k.n_live_tup
$$;
comment on function _health_storage() is 'Vacuum and bloat, for inspect_health.';
