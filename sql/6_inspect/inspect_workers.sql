create or replace function inspect_workers()
returns setof inspected_worker
language plpgsql stable security definer
set search_path from current as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_share real        := _queue_share_to_read();
begin
    perform _require_tables();

    return query
    with held as (
        select l.lease_owner, count(*) as leases,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            min(l.leased_at) as oldest_leased_at,
            min(l.lease_expires_at) filter (where l.lease_expires_at > v_now)
            as next_lease_expires_at,
            (array_agg(l.job_id order by l.leased_at, l.job_id))[1] as oldest_job_id,
            (array_agg(l.holder order by l.leased_at, l.job_id))[1] as oldest_holder
        from live_job as l tablesample system (v_share)
        where l.lease_owner is not null
        group by l.lease_owner
    )
    select coalesce(w.worker, h.lease_owner), w.worker is not null, v_share < 100,
        coalesce(round(h.leases * 100 / v_share)::bigint, 0),
        coalesce(round(h.expired * 100 / v_share)::bigint, 0),
        h.oldest_leased_at::timestamptz, h.next_lease_expires_at::timestamptz,
        case when w.worker is null then 0 else w.sessions end, h.oldest_job_id,
        h.oldest_holder::text
    from _session_workers() as w
    full join held as h on h.lease_owner = w.worker
    order by 1;
end;
$$;
comment on function inspect_workers() is
'Each declared worker, and each that still holds leases: how many, the oldest and its '
'job, when the next one ends, and how many sessions may act as it. Reads the live '
'jobs, at most 64 MB of them.';
