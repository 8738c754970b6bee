create or replace function resume(p_queue text)
returns boolean
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_policy();

    lock table instance in share row exclusive mode;
    perform _require_queue(p_queue);
    update queue as q
    set paused_at = null, paused_by = null
    where q.queue = p_queue collate "C" and q.paused_at is not null;
    if not found then
        return false;
    end if;
    perform _queue_wake(p_queue) where _queue_is_awaited(p_queue);
    insert into operator_act (operator, act, arguments, job_count)
    values (_caller(), 'resume', jsonb_build_object('queue', p_queue), 0);
    return true;
end;
$$;
comment on function resume(text) is
'Lets workers claim jobs of a paused queue again, and wakes those that wait. Returns '
'false if the queue was not paused; audited else. Refuses an undeclared queue (LJ003), '
'and every call while no policy is stored (LJ008).';
