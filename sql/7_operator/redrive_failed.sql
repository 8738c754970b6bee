create or replace function redrive_failed(
    p_queue text,
    p_since timestamptz,
    p_before timestamptz default null,
    p_failure_code text default null,
    p_limit integer default 100,
    p_extra_attempts integer default 1
)
returns integer
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
    v_job_ids uuid[];
    v_count   integer;
begin
    perform _require_queue(p_queue);
    if p_since is null then
        raise exception using
            errcode = 'LJ007',
            message = 'since must not be NULL',
            hint    = 'A job that failed before that time is left alone.';
    end if;
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using
            errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;
    if (p_extra_attempts between 1 and 100) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'extra_attempts must be from 1 to 100';
    end if;

    v_job_ids := array(
        select j.job_id
        from (
            select e.job_id, e.attempt
            from attempt as e
            where
                (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
                and e.ended_at >= p_since
                and e.ended_at < coalesce(p_before, 'infinity')
                and (
                    p_failure_code is null
                    or e.failure_code = p_failure_code collate "C"
                )
            order by e.ended_at, e.job_id
        ) as a
        cross join lateral (
            select i.job_id
            from job as i
            where
                i.job_id = a.job_id
                and i.queue = p_queue collate "C"
                and a.attempt = (
                    select max(n.attempt) from attempt as n where n.job_id = a.job_id
                )
                and (select l.job_id from live_job as l where l.job_id = a.job_id)
                is null
            offset 0
            for update skip locked
        ) as j
        limit p_limit
    );

    -- By a statement of its own, which sees what happened between the look and the lock.
    select q.jobs into v_count from _requeue(v_job_ids, p_extra_attempts) as q;
    if v_count > 0 and _is_awaited(p_queue) then
        perform _wake(p_queue);
    end if;

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'redrive_failed',
        jsonb_build_object(
            'queue', p_queue, 'since', p_since, 'before', p_before,
            'failure_code', p_failure_code, 'limit', p_limit,
            'extra_attempts', p_extra_attempts
        ),
        v_count
    );
    return v_count;
end;
$$;
comment on function
redrive_failed(text, timestamptz, timestamptz, text, integer, integer) is
'Queues up to p_limit failed jobs of a queue again, those first that failed first: '
'that failed since a time and before another or ever (NULL), with one failure code or '
'any (NULL), with that many more attempts each; answers how many; audited. Refuses a '
'queue that is not declared (LJ003), a malformed failure code (LJ005), a NULL since, '
'other than 1 to 10000 jobs or 1 to 100 attempts (LJ007).';
