-- Runs under the planner settings of claim, which alone calls it. A claim that passed
-- over more than 100 entries moves the floor to where it stopped.
create or replace function _claim_due(p_queue text, p_limit integer, p_floor regclass[])
returns tid[] language plpgsql volatile as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_retire integer     := 64;
    v_wanted integer     := p_limit;
    v_rows   tid[]       := array[]::tid[];
    v_bytes  integer[]   := array[]::integer[];
    v_passed bigint;
    v_full   boolean;
    v_start  record;
    v_found  record;
begin
    v_start := _claim_floor(p_floor, v_now);
    v_full := coalesce(v_start.scan_at <= v_now, true);
    loop
        if v_full and v_start.at > '-infinity' then
            -- No other session scans now. If this one dies in its scan, or its claim is
            -- refused above READ COMMITTED, another scans a second later or so.
            perform _claim_floor_scanned(p_floor, v_now, null);
            v_start.at := '-infinity';
        end if;
        v_passed := - _claim_entries_read();
        loop
            -- The rows are locked before anything is written, and no more than are
            -- wanted: an update that joins its own candidates may, under some plans,
            -- take them all.
            select count(*)::integer as rows, max(d.available_at) as last_at,
                array_agg(d.job_id) as job_ids, count(*) filter (where d.is_odd) as odd,
                array_agg(d.ctid) filter (where d.attempt < d.max_attempts) as leasable,
                array_agg(d.payload_bytes) filter (where d.attempt < d.max_attempts)
                as bytes
            into v_found
            from (
                select l.ctid, l.job_id, l.available_at, l.attempt, l.max_attempts,
                    l.payload_bytes,
                    l.attempt >= l.max_attempts or num_nonnulls(
                        l.leased_at, l.lease_expires_at, l.lease_owner,
                        l.lease_token_hash
                    ) > 0 as is_odd
                from live_job as l
                where l.queue = p_queue
                    and l.available_at <= v_now
                    and (l.available_at, l.job_id) > (v_start.at, v_start.id)
                    and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
                    and (l.attempt < l.max_attempts or v_retire > 0)
                order by l.available_at, l.job_id
                limit v_wanted
                for update skip locked
            ) as d;
            exit when v_found.rows = 0;
            v_passed := v_passed - v_found.rows;
            v_start.at := v_found.last_at;
            v_start.id := v_found.job_ids[v_found.rows];
            if v_found.odd > 0 then
                v_retire := v_retire - _claim_reclaim(v_found.job_ids, v_retire);
            end if;

            -- Rows that cannot be leased were ended or passed over: look behind them.
            v_rows := v_rows || v_found.leasable;
            v_bytes := v_bytes || v_found.bytes;
            exit when v_found.rows < v_wanted or cardinality(v_rows) = p_limit;
            v_wanted := p_limit - cardinality(v_rows);
        end loop;
        v_passed := v_passed + _claim_entries_read();
        exit when v_full or v_rows <> '{}' or v_now < v_start.may_scan_at;
        v_full := true;
        v_now := clock_timestamp();
    end loop;

    -- A claim returns at most 16 MB of payloads, which 64 of the largest are. The jobs
    -- beyond stay queued, so no floor may hide them.
    if cardinality(v_rows) > 64 then
        select v_rows[1:count(*)::integer] into v_rows
        from (
            select sum(coalesce(b.bytes, 0)) over (rows unbounded preceding) as upto
            from unnest(v_bytes) as b (bytes)
        ) as s
        where s.upto <= 16777216;
        if cardinality(v_rows) < cardinality(v_bytes) then
            v_passed := 0;
        end if;
    end if;

    if v_passed > 100 then
        perform _claim_floor_move(
            p_floor, v_start.was, v_now, v_full,
            case when v_found.rows = v_wanted then v_start.at end, v_start.id
        );
    elsif v_full and v_start.was is not null then
        perform setval(p_floor[1], 0, false);
    end if;
    return v_rows;
end;
$$;
comment on function _claim_due(text, integer, regclass[]) is
'Locks up to p_limit due jobs for claim and returns where they are. Reclaims the '
'lapsed leases among them, and keeps the claim floor of the queue.';
