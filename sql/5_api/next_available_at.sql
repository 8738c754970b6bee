create or replace function next_available_at(p_queue text)
returns timestamptz
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
    v_now     timestamptz := clock_timestamp();
    v_queued  timestamptz;
    v_lapsing timestamptz;
begin
    perform _require_queue(p_queue);

    select l.available_at::timestamptz into v_queued
    from live_job as l
    where l.queue = p_queue collate "C" and l.lease_expires_at is null
    order by l.available_at, l.job_id
    limit 1;
    if v_queued <= v_now then
        return v_queued;
    end if;

    -- Nothing is due, so whatever lies before now is running, and only that is read.
    select min(l.lease_expires_at)::timestamptz into v_lapsing
    from live_job as l
    where l.queue = p_queue collate "C" and l.available_at <= v_now;
    return least(v_queued, v_lapsing);
end;
$$;
comment on function next_available_at(text) is
'When the next job of a queue falls due, lapsing leases included; NULL while it is '
'empty. For a worker''s sleep: dear while thousands run. Refuses an undeclared queue '
'(LJ003).';
