create or replace function _faults_of_queues()
returns table (finding text, subject text, since timestamptz, detail text)
language plpgsql
stable
as $$
begin
    return query
    with seen as (
        select
            q.*, clock_timestamp() - q.oldest_ready_age as ready_since,
            q.last_claimed_at > clock_timestamp() + interval '1 second' as is_ahead,
            -- One that lies ahead tells nothing of what was claimed since.
            q.last_claimed_at between
            clock_timestamp() - interval '1 minute'
            and clock_timestamp() + interval '1 minute' as is_moving
        from inspect_queues() as q
    )
    select
        case when q.is_moving then 'queue_behind' else 'queue_silent' end,
        q.queue, q.ready_since,
        format(
            '%s ready, the oldest for %s: %s', q.ready,
            date_trunc('second', q.oldest_ready_age),
            (
                select l.job_id
                from live_job as l
                where l.queue = q.queue and l.lease_owner is null
                order by l.available_at, l.job_id
                limit 1
            )
        )
    from seen as q
    where
        q.is_declared
        and q.oldest_ready_age
        > case when q.is_moving then interval '10 minutes' else interval '1 minute' end
    union all
    select
        'clock_went_back', q.queue, q.last_claimed_at, 'behind a claim of this queue'
    from seen as q
    where q.is_ahead
    union all
    select
        'queue_undeclared', q.queue, null,
        format('%s jobs', q.ready + q.scheduled + q.retry_waiting + q.running + q.expired)
    from seen as q
    where not q.is_declared
    union all
    select
        'leases_expired', q.queue, q.oldest_lapse_at, format('%s leases', q.expired)
    from seen as q
    where q.oldest_lapse_at < clock_timestamp() - interval '1 minute'
    union all
    select
        'jobs_failing', q.queue, q.counted_since,
        format(
            '%s of %s failed; most often: %s', q.failed, q.failed + q.succeeded,
            (
                select c.key
                from jsonb_each(q.failure_codes) as c
                order by c.value::bigint desc, c.key
                limit 1
            )
        )
    from seen as q
    where q.failed >= greatest(20, q.succeeded);
end;
$$;
comment on function _faults_of_queues() is
'Queues that stand still, lag, fail or are not declared, for inspect_health.';
