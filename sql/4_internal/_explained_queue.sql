create or replace function _explained_queue(
    p_answer explained_job,
    p_available_at timestamptz,
    p_lease_owner text,
    p_lease_expires_at timestamptz
)
returns explained_job
language plpgsql
stable
as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    p_answer.since := p_available_at;
    if not exists (select from queue as q where q.queue = p_answer.queue) then
        p_answer.reason := 'queue_not_declared';
        return p_answer;
    end if;
    select f.subject into p_answer.who
    from _faults_of_objects() as f
    where f.finding in ('object_changed', 'index_unusable', 'grant_missing')
    order by f.finding, f.subject
    limit 1;
    if found then
        p_answer.reason := 'instance_damaged';
        return p_answer;
    end if;
    if p_lease_owner is null and p_available_at > v_now then
        p_answer.reason
        := case p_answer.attempt when 0 then 'scheduled' else 'retry_waiting' end;
        p_answer.since := null;
        p_answer.until := p_available_at;
        return p_answer;
    end if;
    -- Whoever works or not, it is never begun again.
    if p_lease_owner is not null and p_answer.attempt >= p_answer.max_attempts then
        p_answer.reason := 'attempts_exhausted';
        p_answer.since := p_lease_expires_at;
        p_answer.who := p_lease_owner;
        return p_answer;
    end if;
    if not exists (select from caller as c where c.is_worker) then
        p_answer.reason := 'no_declared_worker';
        return p_answer;
    end if;

    -- Each of them may have lost its role, or its membership.
    if not exists (
        select
        from caller as c
        where
            c.is_worker
            and c.caller not in (
                select f.subject
                from _faults_of_roles() as f
                where f.finding = 'role_missing' or right(f.detail, 7) = '_worker'
            )
    ) then
        p_answer.reason := 'instance_damaged';
        p_answer.who := (
            select 'role ' || min(c.caller)
            from caller as c
            where c.is_worker
        );
        return p_answer;
    end if;

    -- A live lease in the queue proves that somebody works on it.
    if
        _workers_waiting(p_answer.queue) = 0
        and (select sum(w.sessions) from _worker_sessions() as w) = 0
        and not exists (
            select
            from (
                select l.lease_expires_at
                from live_job as l
                where l.queue = p_answer.queue and l.available_at <= v_now
                order by l.available_at, l.job_id
                limit 10000
            ) as f
            where f.lease_expires_at > v_now
        )
    then
        p_answer.reason := 'no_worker_connected';
        return p_answer;
    end if;

    select count(*) into p_answer.ahead
    from (
        select
        from live_job as l
        where
            l.queue = p_answer.queue
            and (l.available_at, l.job_id) < (p_available_at, p_answer.job_id)
            and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
        limit 10000
    ) as b;
    if p_lease_owner is null then
        p_answer.reason := 'ready';
        return p_answer;
    end if;
    p_answer.reason := 'lease_expired';
    p_answer.since := p_lease_expires_at;
    p_answer.who := p_lease_owner;
    return p_answer;
end;
$$;
comment on function _explained_queue(explained_job, timestamptz, text, timestamptz) is
'Adds why a job without a live lease is not claimed yet.';
