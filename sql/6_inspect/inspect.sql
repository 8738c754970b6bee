create or replace function inspect(p_job_id uuid)
returns inspected_job
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
    v_answer inspected_job;
begin
    select
        j.job_id,
        j.queue,
        j.kind,
        case
            when l.lease_owner is not null then 'running'
            when l.job_id is not null then 'queued'
            when a.outcome = 'succeeded' then 'succeeded'
            else 'failed'
        end,
        coalesce(l.attempt, a.attempt),
        coalesce(l.max_attempts, a.max_attempts),
        coalesce(l.available_at, greatest(j.available_at, j.created_at))::timestamptz,
        l.lease_expires_at::timestamptz,
        coalesce(l.last_failure_code, f.failure_code),
        j.created_at::timestamptz,
        greatest(j.created_at, l.leased_at, a.ended_at)::timestamptz,
        j.producer,
        coalesce(l.lease_owner, a.worker),
        case when l.job_id is null then a.ended_at::timestamptz end
    into v_answer
    from job as j
    left join live_job as l on l.job_id = j.job_id
    left join lateral (
        select e.*
        from attempt as e
        where e.job_id = j.job_id
        order by e.attempt desc
        limit 1
    ) as a on true
    left join lateral (
        select e.failure_code
        from attempt as e
        where e.job_id = j.job_id and e.failure_code is not null
        order by e.attempt desc
        limit 1
    ) as f on true
    where j.job_id = p_job_id;
    if not found then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may have been purged, or belong to another Instance.';
    end if;
    return v_answer;
end;
$$;
comment on function inspect(uuid) is
'The durable evidence of one job: identity, status, attempts, lease and retry state, '
'last failure code; never its payload or key. Changes nothing. Refuses an unknown job '
'(LJ006).';
