-- A row that a transaction in progress has locked, changed or deleted names it in xmax.
create or replace function _explain_lock(p_answer explained_job, p_locker xid)
returns explained_job language plpgsql stable as $$
begin
    select w.reason, w.pid, s.owner, s.since,
        case
            when w.pid is null then concat(
                replace(s.remedy, 'rollback', 'commit'), ' keeps what it did, ',
                s.remedy, ' takes it back'
            )
            else format(
                'have session %s commit or roll back, or end it: %s', w.pid,
                coalesce(s.remedy, format('select pg_terminate_backend(%s)', w.pid))
            )
        end
    into p_answer.reason, p_answer.pid, p_answer.who, p_answer.since, p_answer.remedy
    from (
        select 'row_locked', coalesce(l.pid::text, l.virtualtransaction), l.pid, null
        from pg_locks as l
        where l.locktype = 'transactionid' and l.granted and l.transactionid = p_locker
        union all
        select 'table_locked', h.place, h.pid, h.locked
        from _session_locks() as h
        where case when p_locker is null then h.stops_reads else h.stops_claims end
    ) as w (reason, place, pid, locked)
    left join _session_list() as s on s.place = w.place
    where w.pid is distinct from pg_backend_pid()
    -- A session that has locked a table comes before one that waits to.
    order by w.reason, w.locked
    limit 1;
    if not found and _session_is_in_progress(p_locker) then
        p_answer.reason := 'row_locked';
    end if;
    return p_answer;
exception when insufficient_privilege then
    -- A DBA hides pg_locks or pg_stat_activity: inspect_health says so.
    return p_answer;
end;
$$;
comment on function _explain_lock(explained_job, xid) is
'Adds who holds the row, by the transaction that its xmax names, or a whole table.';
