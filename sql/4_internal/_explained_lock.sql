-- A row that a transaction in progress has locked, changed or deleted names it in xmax.
-- Behind whoever waits to lock a table everybody waits, as behind whoever locked it:
-- reading waits for ACCESS EXCLUSIVE alone, claims for what CREATE INDEX takes, too.
create or replace function _explained_lock(p_answer explained_job, p_locker xid)
returns explained_job
language plpgsql
stable
as $$
begin
    select
        case l.locktype when 'relation' then 'table_locked' else 'row_locked' end,
        l.pid, coalesce(s.usename, x.owner)::text, coalesce(s.xact_start, x.prepared)
    into p_answer.reason, p_answer.pid, p_answer.who, p_answer.since
    from pg_locks as l
    left join pg_stat_activity as s on s.pid = l.pid
    left join pg_prepared_xacts as x
        on l.pid is null
        and exists (
            select
            from pg_locks as o
            where
                o.pid is null
                and o.virtualtransaction = l.virtualtransaction
                and o.transactionid = x.transaction
        )
    where
        l.pid is distinct from pg_backend_pid()
        and case l.locktype
            when 'relation'
                then
                    l.database = (
                        select d.oid
                        from pg_database as d
                        where d.datname = current_database()
                    )
                    and case
                        when p_locker is not null
                            then
                                l.relation = 'live_job'::regclass
                                and l.mode in (
                                    'ShareLock', 'ShareRowExclusiveLock',
                                    'ExclusiveLock'
                                )
                        else
                            l.mode = 'AccessExclusiveLock'
                            and l.relation in (
                                select c.oid
                                from pg_class as c
                                join pg_class as i on i.relnamespace = c.relnamespace
                                where i.oid = 'instance'::regclass
                            )
                    end
            when 'transactionid' then l.granted and l.transactionid = p_locker
        end
    order by l.locktype desc, l.granted desc
    limit 1;
    if not found and _is_in_progress(p_locker) then
        p_answer.reason := 'row_locked';
    end if;
    return p_answer;
end;
$$;
comment on function _explained_lock(explained_job, xid) is
'Adds who holds the row, by the transaction that its xmax names, or a whole table.';
