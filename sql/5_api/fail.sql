create or replace function fail(
    p_job_id uuid,
    p_lease_token text,
    p_failure_code text,
    p_retryable boolean
)
returns failed_job
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_hash     bytea := sha256(convert_to(p_lease_token, 'UTF8'));
    v_job      live_job;
    v_now      timestamptz;
    v_retry_at timestamptz;
    v_answer   failed_job;
begin
    if not _is_name(p_failure_code, 128) then
        raise exception using
            errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of '
                      'A-Z a-z 0-9 . _ : / -';
    end if;
    if p_retryable is null then
        raise exception using errcode = 'LJ005', message = 'retryable must not be NULL';
    end if;

    select l.* into v_job
    from live_job as l
    where
        l.job_id = p_job_id
        and l.lease_token_hash = v_hash
        and l.lease_owner = _caller()
    for update;

    if not found then
        -- The first answer may have been lost on its way.
        select case a.outcome when 'retried' then 'queued' else 'failed' end,
            a.retry_at::timestamptz
        into v_answer
        from attempt as a
        where
            a.job_id = p_job_id
            and a.lease_token_hash = v_hash
            and a.worker = _caller()
            and a.failure_code = p_failure_code collate "C"
            and a.retryable = p_retryable;
        if found then
            return v_answer;
        end if;
    end if;

    -- The lock may have been waited for, so the clock is read behind it.
    v_now := clock_timestamp();
    if (v_job.lease_expires_at > v_now) is not true then
        raise exception using
            errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;

    if p_retryable and v_job.attempt < v_job.max_attempts then
        update live_job as l
        set
            available_at = _retry_at(
                v_now, v_job.attempt,
                i.retry_base_seconds, i.retry_max_seconds, i.retry_jitter
            ),
            leased_at = null,
            lease_expires_at = null,
            lease_owner = null,
            lease_token_hash = null,
            last_failure_code = p_failure_code
        from instance as i
        where l.job_id = p_job_id
        returning l.available_at::timestamptz into v_retry_at;
        if _is_awaited(v_job.queue) then
            perform _wake(v_job.queue);
        end if;
    else
        delete from live_job as l where l.job_id = p_job_id;
    end if;

    insert into attempt (
        job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
        retryable, worker, outcome, failure_code, lease_token_hash
    )
    values (
        p_job_id, v_job.leased_at, v_now, v_retry_at, v_job.attempt, v_job.max_attempts,
        p_retryable, v_job.lease_owner,
        case when v_retry_at is null then 'failed' else 'retried' end,
        p_failure_code, v_hash
    );
    return (case when v_retry_at is null then 'failed' else 'queued' end, v_retry_at);
end;
$$;
comment on function fail(uuid, text, text, boolean) is
'Records a failed attempt: queued again with the time the job falls due, or failed for '
'good where it is not retryable or no attempt is left; repeated under the same lease '
'it answers the same. Refuses a malformed code or mark (LJ005), and a lease that is '
'not live and the caller''s own (LJ004).';
