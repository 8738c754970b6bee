create or replace function _explain_row(p_answer explained_job)
returns explained_job language plpgsql stable as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_job    record;
    v_status text;
begin
    select j.queue::text, l.xmax as locker, l.job_id is not null as is_live,
        coalesce(l.attempt, a.attempt) as attempt,
        coalesce(l.max_attempts, a.max_attempts, j.max_attempts) as max_attempts,
        coalesce(l.last_failure_code, a.failure_code)::text as failure_code,
        l.lease_owner::text, l.leased_at::timestamptz, l.lease_expires_at,
        l.available_at, a.worker::text, a.outcome, a.ended_at::timestamptz,
        'application_name of its session: ' || l.holder as holder
    into v_job
    from job as j
    left join live_job as l on l.job_id = j.job_id
    left join lateral (
        select e.*
        from attempt as e
        where e.job_id = j.job_id
        order by e.attempt desc
        limit 1
    ) as a on true
    where j.job_id = p_answer.job_id;
    if not found then
        p_answer.reason := 'purged_or_unknown';
        -- The first 48 bits of a job's id are the milliseconds since 1970.
        if substr(p_answer.job_id::text, 15, 1) = '7' then
            p_answer.since := timestamptz 'epoch' + interval '1 millisecond' * (
                'x' || left(replace(p_answer.job_id::text, '-', ''), 12)
            )::bit(48)::bigint;
        end if;
        select o.before, o.operator
        into p_answer.until, p_answer.who
        from (
            select a.operator_act_id, a.operator::text,
                -- A cast that a filter protects may be reached before the filter.
                case
                    when a.act = 'purge' and a.job_count > 0
                        then (a.arguments ->> 'before')::timestamptz
                    when a.act = 'erase'
                        and a.arguments ->> 'job_id' = p_answer.job_id::text
                        then a.acted_at
                end as before
            from operator_act as a
        ) as o
        where o.before > p_answer.since
        order by o.operator_act_id desc
        limit 1;
        return p_answer;
    end if;

    p_answer.queue := v_job.queue;
    p_answer.attempt := v_job.attempt;
    p_answer.max_attempts := v_job.max_attempts;
    p_answer.failure_code := v_job.failure_code;
    v_status := _status(
        v_job.is_live, v_job.lease_owner is not null, v_job.outcome, v_job.failure_code
    );
    if not v_job.is_live then
        p_answer.reason
        := case v_status when 'lost' then 'evidence_missing' else v_status end;
        p_answer.since := v_job.ended_at;
        p_answer.who := v_job.worker;
        if v_status = 'lost' then
            p_answer.remedy := format(
                'enqueue it again under a new key; or, as the owner: insert into '
                '%1$I.live_job (job_id, available_at, attempt, max_attempts, queue, '
                'payload_bytes) select job_id, clock_timestamp(), %2$s, '
                'greatest(max_attempts, %2$s + 1), queue, '
                'pg_column_size(payload || ''{}'') from %1$I.job where job_id = %3$L',
                -- A worker may have held it as it was deleted: no token is given twice.
                current_schema(), coalesce(v_job.attempt, 0) + 1, p_answer.job_id
            );
        end if;
        return p_answer;
    end if;
    p_answer := _explain_lock(p_answer, v_job.locker);
    if p_answer.reason is null and v_job.lease_expires_at > v_now then
        p_answer.reason := 'leased';
        p_answer.since := v_job.leased_at;
        p_answer.until := v_job.lease_expires_at;
        p_answer.who := v_job.lease_owner;
        p_answer.detail := v_job.holder;
        if v_job.leased_at < v_now - interval '5 minutes' then
            p_answer.detail := concat_ws(
                chr(10), v_job.holder,
                format(
                    'its worker has renewed the lease for %s: its handler is slow, or '
                    'hangs',
                    date_trunc('second', v_now - v_job.leased_at)
                )
            );
        end if;
    elsif p_answer.reason is null then
        p_answer := _explain_queue(
            p_answer, v_job.available_at, v_job.lease_owner, v_job.lease_expires_at
        );
    end if;
    return p_answer;
end;
$$;
comment on function _explain_row(explained_job) is
'Adds why one job is not being claimed, where no table is locked or lost.';
