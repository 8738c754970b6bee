create or replace function _requeue(
    p_job_ids uuid[], p_extra_attempts integer, out jobs integer,
    out available_at timestamptz
)
language plpgsql
volatile
as $$
begin
    -- A lock that leaves a new version behind: a purge with an older snapshot then
    -- fails to serialize, instead of deleting the job of a live row it cannot see.
    update job as j set producer = j.producer where j.job_id = any (p_job_ids);

    available_at := clock_timestamp();
    insert into live_job (
        job_id, available_at, attempt, max_attempts, queue, last_failure_code
    )
    select
        j.job_id, _requeue.available_at, a.attempt, a.attempt + p_extra_attempts,
        j.queue, a.failure_code
    from unnest(p_job_ids) as p (job_id)
    cross join lateral (
        select i.* from job as i where i.job_id = p.job_id offset 0
    ) as j
    cross join lateral (
        select e.*
        from attempt as e
        where e.job_id = p.job_id
        order by e.attempt desc
        limit 1
    ) as a
    where
        a.outcome <> 'succeeded'
        and (select l.job_id from live_job as l where l.job_id = p.job_id) is null;
    get diagnostics jobs = row_count;
end;
$$;
comment on function _requeue(uuid[], integer) is
'Queues those of the jobs that have failed again, due at once, with that many more '
'attempts each; answers how many.';
