create or replace function pause(p_queue text)
returns boolean
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_policy();

    -- As configure does. Otherwise the row of the queue is locked before the policy's.
    lock table instance in share row exclusive mode;
    perform _require_queue(p_queue);
    update queue as q
    set paused_at = clock_timestamp(), paused_by = _caller()
    where q.queue = p_queue collate "C" and q.paused_at is null;
    if not found then
        return false;
    end if;
    insert into operator_act (operator, act, arguments, job_count)
    values (_caller(), 'pause', jsonb_build_object('queue', p_queue), 0);
    return true;
end;
$$;
comment on function pause(text) is
'Stops claims of a queue: they return no row until resume. Jobs that run go on, and '
'jobs are enqueued as before. Returns false if the queue was paused already; audited '
'else. Refuses an undeclared queue (LJ003), and every call while no policy is stored '
'(LJ008).';
