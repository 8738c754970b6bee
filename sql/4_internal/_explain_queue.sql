create or replace function _explain_queue(
    p_answer explained_job, p_available_at timestamptz, p_lease_owner text,
    p_lease_expires_at timestamptz
)
returns explained_job language plpgsql stable as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_front record;
begin
    if not exists (select from queue as q where q.queue = p_answer.queue) then
        p_answer.reason := 'queue_not_declared';
        return p_answer;
    end if;
    select 'queue_paused', q.paused_at, q.paused_by, 'lenso-jobs resume ' || q.queue
    into p_answer.reason, p_answer.since, p_answer.who, p_answer.remedy
    from queue as q
    where q.queue = p_answer.queue and q.paused_at is not null;
    if found then
        return p_answer;
    end if;
    p_answer.since := p_available_at;

    p_answer := _explain_damage(p_answer);
    if p_answer.reason is not null then
        return p_answer;
    end if;
    if p_lease_owner is null and p_available_at > v_now then
        p_answer.reason := case
            when p_answer.attempt = 0 or exists (
                select from attempt as a
                where a.job_id = p_answer.job_id
                    and a.attempt = p_answer.attempt
                    and a.outcome = 'released'
            ) then 'scheduled'
            else 'retry_waiting'
        end;
        p_answer.since := null;
        p_answer.until := p_available_at;
        return p_answer;
    end if;
    -- The job is never begun again, even if workers are connected.
    if p_answer.attempt >= p_answer.max_attempts then
        p_answer.reason := 'attempts_exhausted';
        p_answer.since := coalesce(p_lease_expires_at, p_available_at);
        p_answer.who := p_lease_owner;
        return p_answer;
    end if;
    if not exists (select from caller as c where c.is_worker) then
        p_answer.reason := 'no_declared_worker';
        return p_answer;
    end if;

    -- Each declared worker may have lost its role, or its membership.
    select 'role ' || min(w.caller), string_agg(w.fault, chr(10) order by w.fault),
        min(w.remedy)
    into p_answer.who, p_answer.detail, p_answer.remedy
    from (
        select c.caller, concat(f.subject, ' ', f.detail) as fault, f.remedy
        from caller as c
        left join _health_part('roles') as f
            on f.subject = c.caller
            and (
                f.finding = 'role_missing'
                or (f.finding = 'membership_missing' and right(f.detail, 7) = '_worker')
            )
        where c.is_worker
    ) as w
    having bool_and(w.remedy is not null);
    if found then
        p_answer.reason := 'instance_damaged';
        return p_answer;
    end if;

    select f.* into v_front from _queue_front(p_answer.queue, v_now) as f;
    -- A live lease in the queue proves that a worker is connected.
    if
        _session_waiting(p_answer.queue) = 0
        and (select sum(w.sessions) from _session_workers() as w) = 0
        and v_front.live = 0
    then
        p_answer.reason := 'no_worker_connected';
        p_answer.detail := _explain_silence(p_answer.queue);
        return p_answer;
    end if;

    select count(*) into p_answer.ahead
    from (
        select from live_job as l
        where l.queue = p_answer.queue
            and (l.available_at, l.job_id) < (p_available_at, p_answer.job_id)
            and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
        limit 10000
    ) as b;
    if p_lease_owner is not null then
        p_answer.reason := 'lease_expired';
        p_answer.since := p_lease_expires_at;
        p_answer.who := p_lease_owner;
    else
        p_answer.reason := 'ready';
    end if;
    if
        p_answer.since < v_now - interval '1 minute'
        and not exists (
            select
            from _queue_ends(v_now - interval '1 minute', 10000) as e
            where e.queue = p_answer.queue and e.leased_at > v_now - interval '1 minute'
        )
        and coalesce(v_front.last_claimed_at < v_now - interval '1 minute', true)
    then
        p_answer.reason := 'queue_silent';
        p_answer.detail := _explain_silence(p_answer.queue);
    end if;
    return p_answer;
end;
$$;
comment on function _explain_queue(explained_job, timestamptz, text, timestamptz) is
'Adds why a job without a live lease is not claimed yet.';
