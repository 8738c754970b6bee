create or replace function redrive(p_job_id uuid, p_extra_attempts integer default 1)
returns failed_job
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_jobs integer;
    v_now  timestamptz;
begin
    if (p_extra_attempts between 1 and 100) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'extra_attempts must be from 1 to 100';
    end if;

    select q.jobs, q.available_at into v_jobs, v_now
    from _requeue(array[p_job_id], p_extra_attempts) as q;
    if not exists (select from job as j where j.job_id = p_job_id) then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may have been purged, or belong to another Instance.';
    end if;
    if v_jobs = 0 then
        raise exception using
            errcode = 'LJ007',
            message = 'the job has not failed',
            hint    = 'Only a job whose status is failed can be redriven.';
    end if;
    perform _wake(j.queue)
    from job as j
    where j.job_id = p_job_id and _is_awaited(j.queue);

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'redrive',
        jsonb_build_object('job_id', p_job_id, 'extra_attempts', p_extra_attempts), 1
    );
    return ('queued'::text, v_now);
end;
$$;
comment on function redrive(uuid, integer) is
'Queues a failed job again with that many more attempts, its history kept and its '
'fencing token still growing; audited. Refuses an unknown job (LJ006), a job that has '
'not failed, and other than 1 to 100 attempts (LJ007).';
