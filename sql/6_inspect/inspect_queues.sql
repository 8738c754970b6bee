create or replace function inspect_queues()
returns setof inspected_queue
language plpgsql stable security definer
set search_path from current as $$
declare
    v_now   timestamptz      := clock_timestamp();
    v_from  timestamptz      := v_now - interval '5 minutes';
    v_share real             := _queue_share_to_read();
    v_scale double precision := 100 / v_share;
begin
    perform _require_tables();

    return query
    with live as materialized (
        select l.queue,
            count(*) filter (where w.is_free and l.available_at <= v_now) as ready,
            count(*) filter (where w.is_later and l.last_failure_code is null) as scheduled,
            count(*) filter (where w.is_later and l.last_failure_code is not null)
            as retry_waiting,
            count(*) filter (where l.lease_expires_at > v_now) as running,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            count(*) filter (
                where _lease_is_broken(
                    l.leased_at, l.lease_expires_at, l.lease_owner, l.lease_token_hash
                )
            ) as broken,
            min(l.lease_expires_at) filter (where l.lease_expires_at <= v_now)
            as oldest_lapse_at,
            min(l.leased_at) filter (where l.lease_expires_at > v_now) as oldest_leased_at,
            max(l.leased_at) as last_claimed_at
        from live_job as l tablesample system (v_share)
        cross join lateral (
            select l.lease_owner is null, l.lease_owner is null and l.available_at > v_now
        ) as w (is_free, is_later)
        group by l.queue
    ),
    ends as materialized (select e.* from _queue_ends(v_from) as e),
    ended as (
        select e.queue, max(e.leased_at) as last_claimed_at,
            count(*) filter (where not e.has_failed) as succeeded,
            count(*) filter (where e.has_failed) as failed
        from ends as e
        group by e.queue
    ),
    codes as (
        select c.queue, jsonb_object_agg(c.failure_code, c.number) as numbers
        from (
            select e.queue, e.failure_code, count(*) as number
            from ends as e
            where e.has_failed
            group by e.queue, e.failure_code
        ) as c
        group by c.queue
    )
    select n.queue::text,
        exists (select from queue as q where q.queue = n.queue), v_share < 100,
        coalesce(round(l.ready * v_scale), 0)::bigint,
        coalesce(round(l.scheduled * v_scale), 0)::bigint,
        coalesce(round(l.retry_waiting * v_scale), 0)::bigint,
        coalesce(round(l.running * v_scale), 0)::bigint,
        coalesce(round(l.expired * v_scale), 0)::bigint,
        v_now - (
            select r.available_at::timestamptz
            from live_job as r
            where r.queue = n.queue
                and r.available_at <= v_now
                and r.lease_expires_at is null
            order by r.available_at, r.job_id
            limit 1
        ),
        least(l.oldest_lapse_at, h.oldest_lapse_at),
        (
            select r.available_at::timestamptz
            from live_job as r
            where r.queue = n.queue and r.available_at > v_now
            order by r.available_at, r.job_id
            limit 1
        ),
        greatest(l.last_claimed_at, h.last_claimed_at, e.last_claimed_at),
        case (select count(*) from ends)
            when 10000 then (select min(x.ended_at) from ends as x) else v_from
        end,
        coalesce(e.succeeded, 0), coalesce(e.failed, 0),
        coalesce(c.numbers, '{}'), _session_waiting(n.queue),
        coalesce(greatest(round(l.broken * v_scale)::bigint, h.broken), 0),
        least(l.oldest_leased_at, h.oldest_leased_at),
        (select q.paused_at from queue as q where q.queue = n.queue)
    from (select q.queue from queue as q union select v.queue from live as v) as n
    left join live as l on l.queue = n.queue
    left join ended as e on e.queue = n.queue
    left join codes as c on c.queue = n.queue
    -- A sample may miss the few that run, which lie where claims begin.
    left join lateral (
        select f.* from _queue_front(n.queue, v_now) as f where v_share < 100
    ) as h on true
    order by 1;
end;
$$;
comment on function inspect_queues() is
'Each declared queue, and each that still has live jobs: how many are in which state, '
'how long the oldest ready one waits, when the next falls due, how the last ones ended '
'(of 5 minutes, or the last 10000 ends where those are fewer), how many workers wait. '
'Reads the live jobs, at most 64 MB of them.';
