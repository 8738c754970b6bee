-- Inlined by each statement that reads it.
create or replace function _inspect_row(p_job_id uuid)
returns setof inspected_job
language sql stable as $$
    select j.job_id,
        j.queue,
        j.kind,
        _status(
            l.job_id is not null, l.lease_owner is not null, a.outcome, a.failure_code
        ),
        coalesce(l.attempt, a.attempt, 0),
        coalesce(l.max_attempts, a.max_attempts, j.max_attempts),
        coalesce(l.available_at, greatest(j.available_at, j.created_at))::timestamptz,
        l.lease_expires_at::timestamptz,
        coalesce(l.last_failure_code, f.failure_code),
        j.created_at::timestamptz,
        greatest(j.created_at, l.leased_at, a.ended_at)::timestamptz,
        j.producer,
        coalesce(l.lease_owner, a.worker),
        case
            when l.job_id is null
            and _status(false, false, a.outcome, a.failure_code) <> 'lost'
                then a.ended_at::timestamptz
        end,
        case when l.lease_owner is null then a.holder else l.holder end
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
    where j.job_id = p_job_id
$$;
comment on function _inspect_row(uuid) is
'The durable evidence of one job, whoever asks for it; no row where there is none.';
