create or replace function inspect_attempts(p_job_id uuid)
returns setof inspected_attempt
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_tables();
    if not exists (select from job as j where j.job_id = p_job_id) then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance.';
    end if;

    return query
    select a.attempt, a.worker::text, a.outcome::text, a.leased_at::timestamptz,
        null::timestamptz, a.ended_at::timestamptz, a.failure_code::text, a.retryable,
        a.retry_at::timestamptz, a.max_attempts, a.holder::text
    from attempt as a
    where a.job_id = p_job_id
    order by a.attempt;

    return query
    select l.attempt, l.lease_owner::text, 'running', l.leased_at::timestamptz,
        l.lease_expires_at::timestamptz, null::timestamptz, null, null::boolean,
        null::timestamptz, l.max_attempts, l.holder::text
    from live_job as l
    where l.job_id = p_job_id and l.lease_owner is not null;
end;
$$;
comment on function inspect_attempts(uuid) is
'The history of one job: one row an attempt, in order; the last is running while it '
'holds a lease, live or expired. Refuses an unknown job (LJ006).';
