create or replace function fail(
    p_job_id uuid, p_lease_token text, p_failure_code text, p_retryable boolean,
    p_retry_after_seconds integer default null
)
returns failed_job
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_answer failed_job;
    v_queue  text;
begin
    if not _is_name(p_failure_code, 128) then
        raise exception using errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of '
                      'A-Z a-z 0-9 . _ : / -';
    end if;
    if p_retryable is null then
        raise exception using errcode = 'LJ005', message = 'retryable must not be NULL';
    end if;
    if p_retry_after_seconds < 0 then
        raise exception using errcode = 'LJ005',
            message = 'retry_after_seconds must be 0 or more, or NULL';
    end if;
    if p_retryable then
        perform _require_policy();
    end if;

    -- The statement that writes reads the clock, behind every lock. Where the lease has
    -- expired nothing is decided, and the refusal below undoes the delete.
    with taken as (
        delete from live_job as l
        where l.job_id = p_job_id
            and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        returning l.*, clock_timestamp() as ended_at
    ),
    decided as (
        select t.*,
            case when p_retryable and t.attempt < t.max_attempts
                then _lease_retry_at(
                    t.ended_at, t.attempt,
                    i.retry_base_seconds, i.retry_max_seconds, i.retry_jitter,
                    p_retry_after_seconds
                )
            end as retry_at
        from taken as t
        left join instance as i on true
        where t.lease_expires_at > t.ended_at
    ),
    requeued as (
        insert into live_job (
            job_id, available_at, attempt, max_attempts, payload_bytes, queue,
            last_failure_code
        )
        select
            d.job_id, d.retry_at, d.attempt, d.max_attempts, d.payload_bytes, d.queue,
            p_failure_code
        from decided as d
        where d.retry_at is not null
    ),
    evidence as (
        insert into attempt (
            job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
            retryable, queue, worker, outcome, failure_code, lease_token_hash, holder
        )
        select d.job_id, coalesce(d.leased_at, d.ended_at), d.ended_at, d.retry_at,
            d.attempt, d.max_attempts, p_retryable, d.queue, d.lease_owner,
            case when d.retry_at is null then 'failed' else 'retried' end,
            p_failure_code, d.lease_token_hash, d.holder
        from decided as d
    )
    select
        case when d.retry_at is null then 'failed' else 'queued' end,
        d.retry_at::timestamptz, d.queue
    into v_answer.status, v_answer.available_at, v_queue
    from decided as d;
    if v_answer.status = 'queued' and _queue_is_awaited(v_queue) then
        perform _queue_wake(v_queue);
    end if;
    if v_answer.status is not null then
        return v_answer;
    end if;

    select
        case a.outcome when 'retried' then 'queued' else 'failed' end, a.retry_at
    into v_answer
    from _lease_evidence(p_job_id, p_lease_token) as a
    where a.failure_code = p_failure_code collate "C" and a.retryable = p_retryable;
    if not found then
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;
    return v_answer;
end;
$$;
comment on function fail(uuid, text, text, boolean, integer) is
'Records a failed attempt. Returns queued with the time the job falls due, or failed '
'where it is not retryable or no attempt is left. A retry waits p_retry_after_seconds, '
'by default as long as the policy says, and never longer than retry_max_seconds. '
'Repeated with the same code and mark under the same lease it returns the same. '
'Refuses a malformed code, mark or wait (LJ005), a lease that is not live or not the '
'caller''s own (LJ004), and a retryable failure while no policy is stored (LJ008).';
