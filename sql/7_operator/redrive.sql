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
    v_now timestamptz;
begin
    if (p_extra_attempts between 1 and 100) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'extra_attempts must be from 1 to 100';
    end if;

    -- A lock that leaves a new version behind: a purge with an older snapshot then
    -- fails to serialize, instead of deleting the job of a live row it cannot see.
    update job as j set producer = j.producer where j.job_id = p_job_id;
    if not found then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may have been purged, or belong to another Instance.';
    end if;

    v_now := clock_timestamp();
    insert into live_job (
        job_id, available_at, attempt, max_attempts, queue, last_failure_code
    )
    select
        j.job_id, v_now, a.attempt, a.attempt + p_extra_attempts, j.queue,
        a.failure_code
    from job as j
    cross join lateral (
        select e.*
        from attempt as e
        where e.job_id = j.job_id
        order by e.attempt desc
        limit 1
    ) as a
    where
        j.job_id = p_job_id
        and a.outcome <> 'succeeded'
        and not exists (select from live_job as l where l.job_id = j.job_id);
    if not found then
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
