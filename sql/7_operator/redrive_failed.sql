create or replace function redrive_failed(
    p_queue text, p_since timestamptz, p_before timestamptz default null,
    p_failure_code text default null, p_limit integer default 100,
    p_extra_attempts integer default 1, p_over_seconds integer default 0,
    p_kind text default null
)
returns integer
language plpgsql security definer
set search_path from current as $$
declare
    v_job_ids uuid[];
    v_count   integer;
begin
    perform _require_policy();
    perform _require_queue(p_queue);
    if p_since is null then
        raise exception using errcode = 'LJ007',
            message = 'since must not be NULL',
            hint    = 'A job that failed before that time is left alone.';
    end if;
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    perform _require_range('limit', p_limit, 1, 10000);
    perform _require_range('extra_attempts', p_extra_attempts, 1, 100);
    perform _require_range('over_seconds', p_over_seconds, 0, 86400);
    perform _require_kind(p_kind);

    v_job_ids := array(
        select j.job_id
        from (
            select e.job_id, e.attempt
            from attempt as e
            where
                e.queue = p_queue collate "C"
                and (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
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
            where i.job_id = a.job_id
                and (p_kind is null or i.kind = p_kind collate "C")
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

    -- A separate statement sees what happened between the look and the lock.
    select q.jobs into v_count
    from _redrive_jobs(v_job_ids, p_extra_attempts, p_over_seconds) as q;
    if v_count > 0 then
        perform _queue_wake(p_queue) where _queue_is_awaited(p_queue);
        insert into operator_act (operator, act, arguments, job_count)
        values (
            _caller(), 'redrive_failed',
            jsonb_build_object(
                'queue', p_queue, 'since', p_since, 'before', p_before,
                'failure_code', p_failure_code, 'limit', p_limit,
                'extra_attempts', p_extra_attempts, 'over_seconds', p_over_seconds,
                'kind', p_kind
            ),
            v_count
        );
    end if;
    return v_count;
end;
$$;
comment on function
redrive_failed(text, timestamptz, timestamptz, text, integer, integer, integer, text) is
'Queues up to p_limit failed jobs of a queue again, oldest failure first: those that '
'failed since a time and before another or ever (NULL), with one failure code or any '
'(NULL), of one kind or any (NULL). Each gets that many more attempts. They fall due '
'evenly over p_over_seconds, so that jobs enqueued meanwhile are claimed between them; '
'by default all at once, and then later jobs wait behind them. Returns how many; '
'audited. Refuses a queue that is not declared (LJ003), a malformed failure code '
'(LJ005), a NULL since, other than 1 to 10000 jobs, 1 to 100 attempts or 0 to 86400 '
'seconds, a malformed kind (LJ007), and every call while no policy is stored (LJ008).';
