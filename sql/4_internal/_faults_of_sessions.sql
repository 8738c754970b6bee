-- Since when a transaction is open only a member of pg_read_all_stats is told, so where
-- that is hidden its age in transactions must do.
create or replace function _faults_of_sessions()
returns table (finding text, subject text, since timestamptz, detail text)
language sql
stable
as $$
    with session as (
        select
            'session ' || s.pid as name, s.pid::text as place, s.xact_start as since,
            s.backend_xmin as xmin, s.backend_xid as xid, s.usename::text as who,
            r.pid is not null as is_a_standbys
        from pg_stat_activity as s
        left join pg_stat_replication as r on r.pid = s.pid
        where
            s.pid <> pg_backend_pid()
            and (
                (s.datname = current_database() and s.usesysid is not null)
                -- Whoever is only connecting is in no database, with a snapshot, too.
                or r.pid is not null
            )
        union all
        select
            'prepared transaction ' || x.gid,
            (
                select l.virtualtransaction
                from pg_locks as l
                where l.pid is null and l.transactionid = x.transaction
            ),
            x.prepared, x.transaction, x.transaction, x.owner::text, false
        from pg_prepared_xacts as x
        where x.database = current_database()
        union all
        select
            'replication slot ' || r.slot_name, null, null, r.xmin, null,
            case when r.active then 'active' else 'not active' end, true
        from pg_replication_slots as r
        where r.xmin is not null
    ),
    -- Also in another database, where the numbers of tables may be the same: whoever it
    -- is, is not among the sessions above.
    held as (
        select
            coalesce(l.pid::text, l.virtualtransaction) as place,
            min(concat(
                c.relname,
                case when l.granted then ' is locked' else ' is about to be locked' end
            )) filter (where w.is_a_lock) as locked
        from pg_locks as l
        join pg_class as c on c.oid = l.relation
        join pg_class as i on i.relnamespace = c.relnamespace
        cross join lateral (
            -- Reading waits for the first, writing for the others, and behind whoever
            -- waits for them; of the instance's row the verbs only read.
            select
                l.mode = 'AccessExclusiveLock'
                or (
                    l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock')
                    and c.oid in (
                        'job'::regclass, 'live_job'::regclass, 'attempt'::regclass
                    )
                ) as is_a_lock
        ) as w
        where
            l.locktype = 'relation'
            and i.oid = 'instance'::regclass
            and (
                w.is_a_lock
                or (
                    l.granted
                    -- VACUUM, ANALYZE and CREATE INDEX CONCURRENTLY write no rows.
                    and l.mode not in (
                        'AccessShareLock', 'SIReadLock', 'ShareUpdateExclusiveLock'
                    )
                    and c.oid in (
                        'instance'::regclass, 'job'::regclass, 'live_job'::regclass,
                        'attempt'::regclass
                    )
                )
            )
        group by 1
    ),
    seen as (
        select
            s.*, h.place is not null as is_holding, h.locked,
            clock_timestamp() - s.since as age,
            format(
                'by %s, %s', coalesce(s.who, 'nobody that is known'),
                case
                    when s.since is not null
                        then 'open for '
                        || date_trunc('second', clock_timestamp() - s.since)
                    when coalesce(s.xmin, s.xid) is null then 'since when is hidden'
                    else age(coalesce(s.xmin, s.xid)) || ' transactions old'
                end
            ) as detail
        from session as s
        left join held as h on h.place = s.place
    )
    select 'table_locked', s.name, s.since, s.locked || ' ' || s.detail
    from seen as s
    where s.locked is not null
    union all
    select 'transaction_open', s.name, s.since, s.detail
    from seen as s
    where
        s.is_holding
        and s.locked is null
        and coalesce(s.age > interval '1 minute', age(s.xid) > 1000)
    union all
    select 'snapshot_held', s.name, s.since, s.detail
    from seen as s
    where
        s.xmin is not null
        -- Standbys tell of theirs every ten seconds, many transactions late.
        and coalesce(
            s.age > interval '5 minutes',
            age(s.xmin) > case when s.is_a_standbys then 100000 else 5000 end
        )
$$;
comment on function _faults_of_sessions() is
'Locked tables, open transactions and old snapshots, for inspect_health.';
