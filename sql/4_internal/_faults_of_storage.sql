create or replace function _faults_of_storage()
returns table (finding text, subject text, since timestamptz, detail text)
language sql
stable
as $$
    with kept as (
        select
            c.relname::text as name, s.last_autovacuum, s.n_live_tup, s.n_dead_tup,
            pg_relation_size(c.oid) as size,
            exists (
                select
                from pg_options_to_table(c.reloptions) as o
                where
                    o.option_name = 'autovacuum_enabled'
                    and o.option_value::boolean is false
            ) as is_left_out
        from pg_class as c
        join pg_stat_user_tables as s on s.relid = c.oid
        where c.oid in ('job'::regclass, 'live_job'::regclass, 'attempt'::regclass)
    )
    select
        'autovacuum_off', v.subject, null::timestamptz, v.subject || ' is off'
    from unnest(array['autovacuum', 'track_counts']) as v (subject)
    where current_setting(v.subject) = 'off'
    union all
    select 'autovacuum_off', k.name, null, 'autovacuum_enabled is off'
    from kept as k
    where k.is_left_out
    union all
    -- live_job asks for it at 2,000 dead rows, the others at a fifth of the table.
    select
        'autovacuum_behind', k.name, k.last_autovacuum,
        format('%s dead rows, %s live ones', k.n_dead_tup, k.n_live_tup)
    from kept as k
    where
        k.n_dead_tup
        > 50000 + case k.name when 'live_job' then 0 else k.n_live_tup / 2 end
    union all
    select
        'table_bloated', k.name, null,
        format('%s for %s live rows', pg_size_pretty(k.size), k.n_live_tup)
    from kept as k
    where k.name = 'live_job' and k.size > 268435456 + 10000 * k.n_live_tup
    union all
    select
        'notify_queue_filling', 'the whole server', null,
        format('%s %% full', round(u.usage::numeric * 100))
    from pg_notification_queue_usage() as u (usage)
    where u.usage > 0.25
$$;
comment on function _faults_of_storage() is
'Vacuum, bloat and the queue of notifications, for inspect_health.';
