-- The caller holds the rows. A row of evidence that is there already, by whatever
-- accident, must not keep a queue from going on.
create or replace function _reclaim(p_job_ids uuid[], p_limit integer)
returns integer
language sql
volatile
as $$
    with lapsed as materialized (
        select l.ctid, l.*, clock_timestamp() as ended_at
        from live_job as l
        where
            l.job_id = any (p_job_ids)
            and num_nulls(l.leased_at, l.lease_owner, l.lease_token_hash) = 0
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
        insert into attempt (
            job_id, leased_at, ended_at, attempt, max_attempts,
            worker, outcome, failure_code, lease_token_hash
        )
        select
            e.job_id, e.leased_at, e.ended_at, e.attempt, e.max_attempts,
            e.lease_owner, 'lease_expired',
            case when e.attempt >= e.max_attempts then 'attempts_exhausted' end,
            e.lease_token_hash
        from lapsed as e
        where
            e.attempt < e.max_attempts
            or e.job_id in (select d.job_id from ended as d)
        on conflict (job_id, attempt) do nothing
    )
    select count(*)::integer from ended
$$;
comment on function _reclaim(uuid[], integer) is
'Records the lapsed lease of each of these jobs, and ends up to p_limit of those that '
'had no attempt left; answers how many ended.';
