create or replace function redrive(p_job_id uuid, p_extra_attempts integer default 1)
returns failed_job
language plpgsql security definer
set search_path from current as $$
declare
    v_jobs   integer;
    v_due_at timestamptz;
begin
    perform _require_policy();
    perform _require_range('extra_attempts', p_extra_attempts, 1, 100);

    select q.jobs, q.available_at into v_jobs, v_due_at
    from _redrive_jobs(array[p_job_id], p_extra_attempts, 0) as q;
    if not exists (select from job as j where j.job_id = p_job_id) then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance.';
    end if;
    if v_jobs = 0 then
        raise exception using errcode = 'LJ007',
            message = 'the job has not failed',
            hint    = 'Only a job whose status is failed can be redriven. lenso-jobs '
                      'explain says how to put a lost job back.';
    end if;
    perform _queue_wake(j.queue)
    from job as j
    where j.job_id = p_job_id and _queue_is_awaited(j.queue);

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'redrive',
        jsonb_build_object('job_id', p_job_id, 'extra_attempts', p_extra_attempts), 1
    );
    return ('queued'::text, v_due_at);
end;
$$;
comment on function redrive(uuid, integer) is
'Queues a failed job again with that many more attempts, its history kept and its '
'fencing token still growing; audited. Refuses an unknown job (LJ006), a job that has '
'not failed, and other than 1 to 100 attempts (LJ007).';
