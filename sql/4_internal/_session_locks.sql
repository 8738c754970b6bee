-- Reading waits for ACCESS EXCLUSIVE alone, claims for what CREATE INDEX takes, too.
-- All that would wait for a lock wait behind a session that waits for it.
create or replace function _session_locks()
returns table (
    place text, pid integer, locked text, stops_reads boolean, stops_claims boolean
)
language sql stable as $$
    select coalesce(l.pid::text, l.virtualtransaction), l.pid,
        min(
            case when l.granted then 'has locked ' else 'waits to lock ' end || c.relname
        ) filter (where w.is_in_the_way),
        bool_or(l.mode = 'AccessExclusiveLock'),
        bool_or(w.is_in_the_way and c.oid = 'live_job'::regclass)
    from pg_locks as l
    join pg_database as d on d.oid = l.database and d.datname = current_database()
    join pg_class as c on c.oid = l.relation
    cross join lateral (
        select c.oid in ('job'::regclass, 'live_job'::regclass, 'attempt'::regclass)
    ) as h (is_hot)
    cross join lateral (
        select
            l.mode = 'AccessExclusiveLock' or (
                h.is_hot
                and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock')
            )
    ) as w (is_in_the_way)
    where l.locktype = 'relation'
        and c.relnamespace = (
            select i.relnamespace from pg_class as i where i.oid = 'instance'::regclass
        )
        and (
            w.is_in_the_way
            or (
                l.granted
                and (h.is_hot or c.oid = 'instance'::regclass)
                -- VACUUM, ANALYZE and CREATE INDEX CONCURRENTLY write no rows.
                and l.mode not in (
                    'AccessShareLock', 'SIReadLock', 'ShareUpdateExclusiveLock'
                )
            )
        )
    group by 1, 2
$$;
comment on function _session_locks() is
'The sessions and prepared transactions that write to tables of this Instance, and the '
'lock of each that reads or the verbs wait for.';
