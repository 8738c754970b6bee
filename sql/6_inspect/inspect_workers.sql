create or replace function inspect_workers()
returns setof inspected_worker
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
    v_share real        := _share_to_read();
begin
    return query
    with held as (
        select
            l.lease_owner, count(*) as leases,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            min(l.leased_at) as oldest_leased_at,
            min(l.lease_expires_at) filter (where l.lease_expires_at > v_now)
            as next_lease_expires_at
        from live_job as l tablesample system (v_share)
        where l.lease_owner is not null
        group by l.lease_owner
    )
    select
        coalesce(w.worker, h.lease_owner), w.worker is not null, v_share < 100,
        coalesce(round(h.leases * 100 / v_share)::bigint, 0),
        coalesce(round(h.expired * 100 / v_share)::bigint, 0),
        h.oldest_leased_at::timestamptz, h.next_lease_expires_at::timestamptz,
        coalesce(w.sessions, 0)
    from _worker_sessions() as w
    full join held as h on h.lease_owner = w.worker
    order by 1;
end;
$$;
comment on function inspect_workers() is
'Each declared worker, and each that still holds leases: how many, the oldest, when '
'the next one ends, and how many sessions may act as it. Reads the live jobs, at most '
'64 MB of them.';
