create or replace function release(
    p_job_id uuid, p_lease_token text, p_delay_seconds integer default 0
)
returns failed_job
language plpgsql security definer
set search_path from current as $$
declare
    v_item failed_item;
begin
    perform _require_range('delay_seconds', p_delay_seconds, 0, 86400);

    v_item := release_many(
        array[p_job_id], array[p_lease_token], array[p_delay_seconds]
    );
    if v_item.outcome = 'invalid_lease' then
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended.';
    end if;
    if v_item.outcome = 'invalid_argument' then
        raise exception using errcode = 'LJ007',
            message = 'the job was released 100 times before',
            hint    = 'Complete it, or fail it: a failure uses up an attempt.';
    end if;
    return (v_item.outcome, v_item.available_at);
end;
$$;
comment on function release(uuid, text, integer) is
'Gives a lease back without using up the attempt: the job is queued again, with one '
'attempt more granted. Without a delay it keeps its place in the queue, else it falls '
'due after that many seconds. Returns queued and the time it falls due; repeated under '
'the same lease it returns the same. Refuses a lease that is not live or not the '
'caller''s own (LJ004), a delay outside 0 to 86400 seconds, a job that was released '
'100 times before (LJ007), and every call while no policy is stored (LJ008).';
