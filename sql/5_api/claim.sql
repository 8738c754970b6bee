create or replace function claim(p_queue text, p_limit integer default 1)
returns setof leased_job
language plpgsql
security definer
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
    v_caller   text        collate "C";
    v_lease    interval;
    v_is_known boolean;
    v_floor    text;
    v_now      timestamptz := clock_timestamp();
    v_read     bigint      := _entries_read();
    v_secret   bytea
    := uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());
begin
    select
        _caller(), make_interval(secs => i.lease_seconds),
        p_queue collate "C" = any (i.queues),
        'lenso_jobs.floor_' || to_hex(_advisory_key(p_queue))
    into v_caller, v_lease, v_is_known, v_floor
    from instance as i
    where _caller() = any (i.workers);
    if not found then
        raise exception using
            errcode = '42501',
            message = format('role %I is not a declared worker', _caller()),
            hint    = 'SET ROLE to a role that worker_instances names.';
    end if;
    if v_is_known is not true then
        perform _require_queue(p_queue);
    end if;
    if (p_limit between 1 and 1000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 1000';
    end if;

    -- One job, and nothing in the way: one statement, an eighth of a whole claim
    -- cheaper. A job with a lapsed lease, or changed since the snapshot, is not for it.
    if p_limit = 1 and coalesce(current_setting(v_floor, true), '') = '' then
        return query
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = v_now,
                lease_expires_at = v_now + v_lease,
                lease_owner = v_caller,
                lease_token_hash
                = sha256(convert_to(_lease_token(v_secret, l.job_id), 'UTF8'))
            where
                l.ctid = (
                    select d.ctid
                    from live_job as d
                    where
                        d.queue = p_queue collate "C"
                        and d.available_at <= v_now
                        and (d.lease_expires_at is null or d.lease_expires_at <= v_now)
                    order by d.available_at, d.job_id
                    limit 1
                    for update skip locked
                )
                and l.lease_owner is null
                and l.attempt < l.max_attempts
            returning l.*
        )
        select
            l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, _lease_token(v_secret, l.job_id),
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j;
        if found then
            if _entries_read() - v_read > 101 then
                perform set_config(v_floor, '0 ' || repeat('0', 32) || ' 0 0 1', false);
            end if;
            return;
        end if;
    end if;

    return query
    select d.*
    from _lease_due(
        p_queue collate "C", p_limit, v_caller, v_lease, v_secret, v_floor
    ) as d;
end;
$$;
comment on function claim(text, integer) is
'Leases up to p_limit due jobs of a queue, oldest due first, each with its attempt '
'(the fencing token) and a fresh lease token; no row where none is due. Reclaims '
'lapsed leases and ends up to 64 jobs whose last one lapsed. Refuses an undeclared '
'caller (42501), an undeclared queue (LJ003), a limit outside 1 to 1000 (LJ007).';
