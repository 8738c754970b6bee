create or replace function explain_job(p_job_id uuid)
returns explained_job
language plpgsql
stable
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
    v_now    timestamptz := clock_timestamp();
    v_answer explained_job;
    v_job    record;
begin
    if p_job_id is null then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'job_id must not be NULL.';
    end if;
    v_answer.job_id := p_job_id;

    if _missing_table() is not null then
        v_answer.reason := 'instance_damaged';
        v_answer.who := 'table ' || _missing_table();
    else
        v_answer := _explained_lock(v_answer, null);
    end if;
    if v_answer.reason is null then
        select
            j.queue::text, l.xmax as locker, l.job_id is not null as is_live,
            coalesce(l.attempt, a.attempt) as attempt,
            coalesce(l.max_attempts, a.max_attempts) as max_attempts,
            coalesce(l.last_failure_code, a.failure_code)::text as failure_code,
            l.lease_owner::text, l.leased_at::timestamptz, l.lease_expires_at,
            l.available_at, a.worker::text, a.outcome, a.ended_at::timestamptz
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
        where j.job_id = p_job_id;

        if not found then
            v_answer := _explained_absence(v_answer);
        else
            v_answer.queue := v_job.queue;
            v_answer.attempt := v_job.attempt;
            v_answer.max_attempts := v_job.max_attempts;
            v_answer.failure_code := v_job.failure_code;
            if v_job.is_live then
                v_answer := _explained_lock(v_answer, v_job.locker);
            else
                v_answer.since := v_job.ended_at;
                v_answer.who := v_job.worker;
                v_answer.reason := case
                    when v_job.outcome is null then 'evidence_missing'
                    when v_job.outcome = 'succeeded' then 'succeeded'
                    else 'failed'
                end;
            end if;
            if v_answer.reason is null and v_job.lease_expires_at > v_now then
                v_answer.reason := 'leased';
                v_answer.since := v_job.leased_at;
                v_answer.until := v_job.lease_expires_at;
                v_answer.who := v_job.lease_owner;
            end if;
            if v_answer.reason is null then
                v_answer := _explained_queue(
                    v_answer, v_job.available_at, v_job.lease_owner,
                    v_job.lease_expires_at
                );
            end if;
        end if;
    end if;

    select r.meaning, r.remedy into v_answer.meaning, v_answer.remedy
    from explain_reason as r
    where r.reason = v_answer.reason;
    return v_answer;
end;
$$;
comment on function explain_job(uuid) is
'Why a job is not being claimed: one reason of explain_reason, with its facts, what it '
'means and what to do. Changes and locks nothing. Refuses NULL (LJ006).';
