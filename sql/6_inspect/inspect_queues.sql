create or replace function inspect_queues()
returns setof inspected_queue
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
    v_now   timestamptz := clock_timestamp();
    v_from  timestamptz := v_now - interval '5 minutes';
    v_share real        := _share_to_read();
begin
    return query
    with live as (
        select
            l.queue,
            count(*) filter (
                where l.lease_owner is null and l.available_at <= v_now
            ) as ready,
            count(*) filter (
                where l.lease_owner is null and l.available_at > v_now and l.attempt = 0
            ) as scheduled,
            count(*) filter (
                where l.lease_owner is null and l.available_at > v_now and l.attempt > 0
            ) as retry_waiting,
            count(*) filter (where l.lease_expires_at > v_now) as running,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            min(l.lease_expires_at) filter (where l.lease_expires_at <= v_now)
            as oldest_lapse_at,
            max(l.leased_at) as last_claimed_at
        from live_job as l tablesample system (v_share)
        group by l.queue
    ),
    -- A job's row is found by its key behind a fence, and of the ends only so many are
    -- read as a second or so of a busy Instance holds.
    ends as materialized (
        select j.queue, e.*
        from (
            select a.job_id, a.leased_at, a.ended_at, a.outcome, a.failure_code
            from attempt as a
            where
                a.ended_at > v_from
                and (
                    a.outcome in ('succeeded', 'failed')
                    or a.failure_code = 'attempts_exhausted'
                )
            order by a.ended_at desc
            limit 10000
        ) as e
        cross join lateral (
            select i.queue from job as i where i.job_id = e.job_id offset 0
        ) as j
    ),
    codes as (
        select e.queue, e.failure_code, count(*) as number
        from ends as e
        where e.outcome <> 'succeeded'
        group by e.queue, e.failure_code
    ),
    ended as (
        select
            e.queue,
            count(*) filter (where e.outcome = 'succeeded') as succeeded,
            count(*) filter (where e.outcome <> 'succeeded') as failed,
            max(e.leased_at) as last_claimed_at,
            (
                select jsonb_object_agg(c.failure_code, c.number)
                from codes as c
                where c.queue = e.queue
            ) as failure_codes
        from ends as e
        group by e.queue
    ),
    named as (
        select q.queue from queue as q
        union
        select l.queue from live as l
    )
    select
        n.queue::text,
        exists (select from queue as q where q.queue = n.queue), v_share < 100,
        coalesce(round(l.ready * 100 / v_share)::bigint, 0),
        coalesce(round(l.scheduled * 100 / v_share)::bigint, 0),
        coalesce(round(l.retry_waiting * 100 / v_share)::bigint, 0),
        coalesce(round(l.running * 100 / v_share)::bigint, 0),
        coalesce(round(l.expired * 100 / v_share)::bigint, 0),
        v_now - (
            select r.available_at::timestamptz
            from live_job as r
            where
                r.queue = n.queue
                and r.available_at <= v_now
                and r.lease_expires_at is null
            order by r.available_at, r.job_id
            limit 1
        ),
        least(l.oldest_lapse_at, h.oldest_lapse_at)::timestamptz,
        (
            select r.available_at::timestamptz
            from live_job as r
            where r.queue = n.queue and r.available_at > v_now
            order by r.available_at, r.job_id
            limit 1
        ),
        greatest(l.last_claimed_at, h.last_claimed_at, e.last_claimed_at)::timestamptz,
        case
            when (select count(*) from ends) = 10000
                then (select min(x.ended_at) from ends as x)::timestamptz
            else v_from
        end,
        coalesce(e.succeeded, 0), coalesce(e.failed, 0),
        coalesce(e.failure_codes, '{}'), _workers_waiting(n.queue)
    from named as n
    left join live as l on l.queue = n.queue
    left join ended as e on e.queue = n.queue
    -- A sample may miss the few that run, which lie where claims begin.
    cross join lateral (
        select
            max(f.leased_at) as last_claimed_at,
            min(f.lease_expires_at) filter (where f.lease_expires_at <= v_now)
            as oldest_lapse_at
        from (
            select r.leased_at, r.lease_expires_at
            from live_job as r
            where r.queue = n.queue and r.available_at <= v_now and v_share < 100
            order by r.available_at, r.job_id
            limit 10000
        ) as f
    ) as h
    order by 1;
end;
$$;
comment on function inspect_queues() is
'Each declared queue, and each that still has live jobs: how many are in which state, '
'how long the oldest ready one waits, when the next falls due, how the last ones ended '
'(of 5 minutes, or the last 10000 ends where those are fewer), how many workers wait. '
'Reads the live jobs, at most 64 MB of them.';
