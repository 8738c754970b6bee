create or replace function _health_queues()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
declare
    v_queues inspected_queue[] := array(select q from inspect_queues() as q);
    v_now    timestamptz       := clock_timestamp();
begin
    return query
    with seen as (
        select q.*, v_now - q.oldest_ready_age as ready_since,
            q.last_claimed_at > v_now + interval '1 second' as is_ahead,
            -- One that lies ahead tells nothing of what was claimed since.
            q.last_claimed_at between v_now - interval '1 minute'
            and v_now + interval '1 minute' as is_moving
        from unnest(v_queues) as q
    )
    select case when q.is_moving then 'queue_behind' else 'queue_silent' end,
        q.queue, q.ready_since,
        format(
            'has %s ready, the oldest for %s', _health_counted(q.ready, 'job'),
            date_trunc('second', q.oldest_ready_age)
        ),
        'lenso-jobs explain ' || (
            select l.job_id
            from live_job as l
            where l.queue = q.queue and l.lease_owner is null
            order by l.available_at, l.job_id
            limit 1
        )
    from seen as q
    where q.is_declared
        and q.paused_at is null
        and q.oldest_ready_age
        > case when q.is_moving then interval '10 minutes' else interval '1 minute' end
    union all
    select 'queue_paused', q.queue, q.paused_at,
        format(
            'was paused by %s and has %s ready',
            (select p.paused_by from queue as p where p.queue = q.queue),
            _health_counted(q.ready, 'job')
        ), 'lenso-jobs resume ' || q.queue
    from seen as q
    where q.paused_at is not null
    union all
    select 'clock_went_back', q.queue, q.last_claimed_at,
        'has a claim that lies ahead of the server''s clock', null
    from seen as q
    where q.is_ahead
    union all
    select 'queue_undeclared', q.queue, null,
        format(
            'is not declared and has %s',
            _health_counted(
                q.ready + q.scheduled + q.retry_waiting + q.running + q.expired,
                'live job'
            )
        ), null
    from seen as q
    where not q.is_declared
    union all
    select 'leases_expired', q.queue, q.oldest_lapse_at,
        format('has %s that ran out', _health_counted(q.expired, 'lease')), null
    from seen as q
    where q.oldest_lapse_at < v_now - interval '1 minute' and q.paused_at is null
    union all
    select 'lease_broken', q.queue, null::timestamptz,
        format('has %s with half a lease', _health_counted(q.broken, 'live job')),
        -- A lease that has run out is taken or ended by the next claim.
        format(
            'update %1$I.live_job set leased_at = coalesce(leased_at, clock_timestamp())'
            ', lease_expires_at = clock_timestamp(), lease_owner = coalesce(lease_owner, '
            '''unknown''), lease_token_hash = coalesce(lease_token_hash, sha256('''')) '
            'where queue = %2$L and %1$I._lease_is_broken(leased_at, lease_expires_at, '
            'lease_owner, lease_token_hash)',
            current_schema(), q.queue
        )
    from seen as q
    where q.broken > 0
    union all
    select 'lease_held_long', q.queue, q.oldest_leased_at,
        concat(
            'has a lease that has been renewed for ',
            date_trunc('second', v_now - q.oldest_leased_at),
            ', held by ' || h.lease_owner, ' in ' || h.holder
        ), 'lenso-jobs explain ' || h.job_id
    from seen as q
    cross join instance as i
    left join lateral (
        select f.job_id, f.lease_owner, f.holder
        from (
            select l.*
            from live_job as l
            where l.queue = q.queue and l.available_at <= v_now
            order by l.available_at, l.job_id
            limit 10000
        ) as f
        where f.leased_at = q.oldest_leased_at
        limit 1
    ) as h on true
    where
        q.oldest_leased_at < v_now - greatest(
            make_interval(secs => 100 * i.lease_seconds), interval '1 day'
        )
    union all
    select 'jobs_far_ahead', q.queue, null,
        format(
            'has %s due in more than ten years, the last at %s',
            _health_counted(f.number, 'job'), f.latest
        ), 'lenso-jobs explain ' || f.job_id
    from seen as q
    cross join lateral (
        select count(*) as number, max(l.available_at) as latest,
            (array_agg(l.job_id))[1] as job_id
        from (
            select r.available_at, r.job_id
            from live_job as r
            where r.queue = q.queue
                and r.available_at > v_now + interval '10 years'
            order by r.available_at desc, r.job_id desc
            limit 10000
        ) as l
    ) as f
    where f.number > 0;
end;
$$;
comment on function _health_queues() is
'Queues that stand still, lag, are paused or not declared, leases that are broken or '
'held long, and jobs that are due in more than ten years, for inspect_health.';
