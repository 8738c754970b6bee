create or replace function _health_server()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    select 'notify_queue_filling', 'the server''s queue of notifications',
        null::timestamptz, format('is %s %% full', round(u.usage::numeric * 100)), null
    from pg_notification_queue_usage() as u (usage)
    where u.usage > 0.25
    union all
    -- What superusers and pg_use_reserved_connections keep is not for callers.
    select 'connections_scarce', 'the server', null,
        format(
            'has %s of %s connections in use, and keeps %s of them for superusers',
            u.number, l.number, l.kept
        ), null
    from (
        select count(*) from pg_stat_activity as a where a.usesysid is not null
    ) as u (number)
    cross join (
        select current_setting('max_connections')::integer,
            current_setting('superuser_reserved_connections')::integer
            + coalesce(current_setting('reserved_connections', true), '0')::integer
    ) as l (number, kept)
    where u.number >= 0.9 * (l.number - l.kept)
    union all
    select 'connections_scarce', 'database ' || d.datname, null,
        format('has %s of %s connections in use', u.number, d.datconnlimit),
        format('alter database %I connection limit -1', d.datname)
    from pg_database as d
    cross join lateral (
        select count(*) from pg_stat_activity as a
        where a.datid = d.oid and a.usesysid is not null
    ) as u (number)
    where d.datname = current_database()
        and d.datconnlimit >= 0 and u.number >= 0.9 * d.datconnlimit
    union all
    select 'slot_keeps_wal', 'replication slot ' || s.slot_name, null,
        format(
            'is %s and keeps %s of WAL',
            case when s.active then 'active' else 'not active' end, pg_size_pretty(s.kept)
        ),
        case
            when not s.active
                then format('select pg_drop_replication_slot(%L)', s.slot_name)
        end
    from (
        select r.*,
            pg_wal_lsn_diff(
                case
                    when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                    else pg_current_wal_lsn()
                end, r.restart_lsn
            ) as kept
        from pg_replication_slots as r
    ) as s
    where s.wal_status in ('extended', 'unreserved')
        or s.kept > case when s.active then 10 else 1 end * 1024 ^ 3
    union all
    select 'slot_invalid', 'replication slot ' || s.slot_name, null,
        'was invalidated, and nobody can read from it',
        format('select pg_drop_replication_slot(%L)', s.slot_name)
    from pg_replication_slots as s
    where s.wal_status = 'lost' or to_jsonb(s) ->> 'invalidation_reason' is not null
$$;
comment on function _health_server() is
'What the whole server runs out of, for inspect_health.';
