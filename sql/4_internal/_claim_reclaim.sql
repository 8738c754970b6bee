-- The caller holds the rows. A lease is recorded whichever of its four fields are left,
-- and a job without an attempt left is ended: a row broken by hand stops no queue. A
-- row of evidence that is there already stays, unless it says that another attempt
-- would follow.
create or replace function _claim_reclaim(p_job_ids uuid[], p_limit integer)
returns integer language sql volatile as $$
    with lapsed as materialized (
        select l.ctid, l.*, clock_timestamp() as ended_at
        from live_job as l
        where l.job_id = any (p_job_ids)
            and (
                l.attempt >= l.max_attempts
                or num_nonnulls(
                    l.leased_at, l.lease_expires_at, l.lease_owner, l.lease_token_hash
                ) > 0
            )
    ),
    ended as (
        delete from live_job as l
        where l.ctid = any (array(
            select e.ctid
            from lapsed as e
            where e.attempt >= e.max_attempts
            order by e.available_at, e.job_id
            limit p_limit
        ))
        returning l.job_id
    ),
    evidence as (
        insert into attempt as a (
            job_id, leased_at, ended_at, attempt, max_attempts,
            queue, worker, outcome, failure_code, lease_token_hash, holder
        )
        select e.job_id, coalesce(e.leased_at, e.ended_at), e.ended_at, e.attempt,
            e.max_attempts, e.queue, coalesce(e.lease_owner, 'unknown'), 'lease_expired',
            case when e.attempt >= e.max_attempts then 'attempts_exhausted' end,
            coalesce(e.lease_token_hash, ''), e.holder
        from lapsed as e
        where e.attempt < e.max_attempts
            or e.job_id in (select d.job_id from ended as d)
        on conflict (job_id, attempt) do update
        set
            outcome = 'failed',
            retry_at = null,
            failure_code = coalesce(a.failure_code, excluded.failure_code)
        where excluded.failure_code = 'attempts_exhausted'
            and a.outcome in ('retried', 'released')
    )
    select count(*)::integer from ended
$$;
comment on function _claim_reclaim(uuid[], integer) is
'Records the lapsed lease of each of these jobs, and ends up to p_limit of those that '
'have no attempt left. Returns how many ended.';
