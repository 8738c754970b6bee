create or replace function claim(p_queue text, p_limit integer default 1)
returns setof leased_job
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_tidscan = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_caller  text        collate "C";
    v_holder  text        collate "C";
    v_lease   interval;
    v_place   integer;
    v_paused  boolean;
    v_floor   regclass[];
    v_was     bigint;
    v_start   record;
    v_at      timestamptz := timestamptz '-infinity';
    v_id      uuid        := uuid '00000000-0000-0000-0000-000000000000';
    v_scan_at timestamptz;
    v_job     leased_job;
    v_rows    tid[];
    v_now     timestamptz := clock_timestamp();
    v_read    bigint      := _claim_entries_read();
    v_secret  bytea
    := uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());
begin
    -- So much of a name is in pg_stat_activity. Outside ASCII the setting is longer.
    select _caller(), nullif(left(current_setting('application_name'), 63), ''),
        make_interval(secs => i.lease_seconds),
        array_position(i.queues, p_queue collate "C"), i.floors,
        p_queue collate "C" = any (i.paused)
    into v_caller, v_holder, v_lease, v_place, v_floor, v_paused
    from instance as i
    where _caller() = any (i.workers);
    if not found then
        perform _require_policy();
        raise exception using errcode = '42501',
            message = format('role %I is not a declared worker', _caller()),
            hint    = 'SET ROLE to a role that worker_instances names.';
    end if;
    if v_place is null then
        perform _require_queue(p_queue);
    end if;
    if (p_limit between 1 and 1000) is not true then
        raise exception using errcode = 'LJ007',
            message = 'limit must be from 1 to 1000';
    end if;
    if v_paused then
        return;
    end if;

    v_floor := _claim_floor_of(v_floor, v_place);
    v_was := pg_sequence_last_value(v_floor[1]);
    if v_was is not null then
        v_start := _claim_floor(v_floor, v_now);
        v_at := v_start.at;
        v_id := v_start.id;
        v_scan_at := v_start.scan_at;
    end if;

    -- One job: one statement, an eighth of a whole claim cheaper. It leaves a row that
    -- holds a lease of any kind, or was changed since the snapshot, to the statements
    -- below. The UPDATE reads the clock, so that no wait for a lock on a table shortens
    -- the lease.
    if p_limit = 1 and coalesce(v_scan_at > v_now, true) then
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = c.now,
                lease_expires_at = c.now + v_lease,
                lease_owner = v_caller,
                holder = v_holder,
                lease_token_hash
                = sha256(convert_to(_lease_token(v_secret, l.job_id), 'UTF8'))
            from (select clock_timestamp() as now offset 0) as c
            where
                l.ctid = (
                    select d.ctid
                    from live_job as d
                    where d.queue = p_queue collate "C"
                        and d.available_at <= v_now
                        and (d.available_at, d.job_id) > (v_at, v_id)
                        and (d.lease_expires_at is null or d.lease_expires_at <= v_now)
                    order by d.available_at, d.job_id
                    limit 1
                    for update skip locked
                )
                and num_nulls(
                    l.leased_at, l.lease_expires_at, l.lease_owner, l.lease_token_hash
                ) = 4
                and l.attempt < l.max_attempts
            returning l.*
        )
        select l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, _lease_token(v_secret, l.job_id),
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        into v_job
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j;
        if v_job.job_id is not null then
            return next v_job;
            if _claim_entries_read() - v_read > 101 then
                perform _claim_floor_move(
                    v_floor, v_was, v_now, v_scan_at is null, l.available_at, l.job_id
                )
                from live_job as l
                where l.job_id = v_job.job_id;
            end if;
            return;
        end if;
    end if;

    -- No column of an index changes: the new version stays in its page and the index
    -- is left alone. The rows are locked, so they are where they were. They are found by
    -- place, and each job by its key behind a fence: the planner has nothing to choose.
    -- Each token is made once, because hashes are a quarter of the cost of a job.
    -- A live row whose job was deleted by hand is leased to nobody. If all were such
    -- rows, it looks again: then no lease that it returns has waited for the locks of
    -- another round.
    for v_round in 1 .. 64 loop
        v_rows := _claim_due(p_queue collate "C", p_limit, v_floor);
        return query
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = c.now,
                lease_expires_at = c.now + v_lease,
                lease_owner = v_caller,
                holder = v_holder,
                lease_token_hash = sha256(convert_to(t.token, 'UTF8'))
            from (select clock_timestamp() as now offset 0) as c
            cross join (
                select r.ctid, _lease_token(v_secret, r.job_id) as token
                from live_job as r
                where r.ctid = any (v_rows)
                offset 0
            ) as t
            where l.ctid = t.ctid
            returning l.*, t.token
        )
        select l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, l.token,
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j
        order by l.available_at, l.job_id;
        exit when found or v_rows = '{}';
    end loop;
end;
$$;
comment on function claim(text, integer) is
'Leases up to p_limit due jobs of a queue, oldest due first, each with its attempt '
'(the fencing token) and a fresh lease token, and at most 16 MB of payloads in all. '
'Returns no row where none is due or the queue is paused. Reclaims lapsed leases '
'and ends up to 64 jobs that have no attempt left. Refuses an undeclared caller '
'(42501), an undeclared queue (LJ003), a limit outside 1 to 1000 (LJ007), and every '
'call while no policy is stored (LJ008).';
