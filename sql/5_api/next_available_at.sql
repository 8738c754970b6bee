create or replace function next_available_at(p_queue text)
returns timestamptz
language plpgsql stable security definer
set search_path from current as $$
declare
    v_queued  timestamptz;
    v_lapsing timestamptz;
    v_now     timestamptz := clock_timestamp();
    v_place   integer;
    v_paused  boolean;
    v_floor   regclass[];
    v_start   record;
begin
    select array_position(i.queues, p_queue collate "C"), i.floors,
        p_queue collate "C" = any (i.paused)
    into v_place, v_floor, v_paused
    from instance as i;
    if v_place is null then
        perform _require_queue(p_queue);
    end if;
    if v_paused then
        return null;
    end if;
    v_start := _claim_floor(_claim_floor_of(v_floor, v_place), v_now);

    select l.available_at::timestamptz into v_queued
    from live_job as l
    where l.queue = p_queue collate "C" and l.lease_expires_at is null
        and (l.available_at, l.job_id) > (v_start.at, v_start.id)
    order by l.available_at, l.job_id
    limit 1;
    v_now := clock_timestamp();
    if v_queued <= v_now then
        return v_queued;
    end if;

    -- Nothing is due, so every job before now is running, and only those are read. The
    -- next full scan finds what lies below the claim floor.
    select min(l.lease_expires_at)::timestamptz into v_lapsing
    from live_job as l
    where l.queue = p_queue collate "C" and l.available_at <= v_now
        and (l.available_at, l.job_id) > (v_start.at, v_start.id);
    return least(v_queued, v_lapsing, v_start.scan_at);
end;
$$;
comment on function next_available_at(text) is
'When the next job of a queue falls due, lapsing leases included; NULL while it is '
'empty or paused. For a worker''s sleep: slow while thousands run. While the queue has '
'a claim floor, no later than the next full scan. Refuses an undeclared queue (LJ003).';
