create or replace function _redrive_jobs(
    p_job_ids uuid[], p_extra_attempts integer, p_over_seconds integer,
    out jobs integer, out available_at timestamptz
)
language plpgsql volatile as $$
begin
    -- A lock that leaves a new version behind: a purge with an older snapshot then
    -- fails to serialize, instead of deleting the job of a live row it cannot see.
    update job as j set producer = j.producer where j.job_id = any (p_job_ids);

    with queued as (
        insert into live_job as l (
            job_id, available_at, attempt, max_attempts, payload_bytes, queue,
            last_failure_code
        )
        select j.job_id,
            clock_timestamp() + make_interval(
                secs => p_over_seconds * (p.place - 1.0) / cardinality(p_job_ids)
            ),
            a.attempt, a.attempt + p_extra_attempts, octet_length(j.payload::text),
            j.queue, a.failure_code
        from unnest(p_job_ids) with ordinality as p (job_id, place)
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
        where _status(false, false, a.outcome, a.failure_code) = 'failed'
            and (select n.job_id from live_job as n where n.job_id = p.job_id) is null
        returning l.available_at
    )
    select count(*)::integer, min(q.available_at)
    into jobs, available_at
    from queued as q;
end;
$$;
comment on function _redrive_jobs(uuid[], integer, integer) is
'Queues those of the jobs that have failed again, with that many more attempts each. '
'They fall due evenly over so many seconds from now, in the order given. Returns how '
'many, and when the first falls due.';
