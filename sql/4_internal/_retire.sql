-- The caller holds the rows. A row of evidence that is there already, by whatever
-- accident, must not keep a queue from going on.
create or replace function _retire(p_job_ids uuid[], p_limit integer)
returns integer
language sql
volatile
as $$
    with ended as (
        delete from live_job as l
        where l.job_id in (
            select e.job_id
            from live_job as e
            where
                e.job_id = any (p_job_ids)
                and num_nulls(e.leased_at, e.lease_owner, e.lease_token_hash) = 0
                and e.attempt >= e.max_attempts
            order by e.available_at, e.job_id
            limit p_limit
        )
        returning l.*
    ),
    evidence as (
        insert into attempt (
            job_id, leased_at, ended_at, attempt, max_attempts,
            worker, outcome, failure_code, lease_token_hash
        )
        select
            e.job_id, e.leased_at, clock_timestamp(), e.attempt, e.max_attempts,
            e.lease_owner, 'lease_expired', 'attempts_exhausted', e.lease_token_hash
        from ended as e
        on conflict (job_id, attempt) do nothing
    )
    select count(*)::integer from ended
$$;
comment on function _retire(uuid[], integer) is
'Ends the jobs among these whose last attempt''s lease ran out; answers how many.';
