create or replace function claim(p_queue text, p_limit integer default 1)
returns setof leased_job
language plpgsql
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
    v_caller   text;
    v_lease    interval;
    v_is_known boolean;
    v_now      timestamptz := clock_timestamp();
    v_at       timestamptz := timestamptz '-infinity';
    v_job_id   uuid        := uuid '00000000-0000-0000-0000-000000000000';
    v_due      uuid[];
    v_lapsed   bigint;
    v_wanted   integer     := p_limit;
    v_leased   integer;
    v_retire   integer     := 64;
begin
    select _caller(), make_interval(secs => i.lease_seconds), p_queue = any (i.queues)
    into v_caller, v_lease, v_is_known
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

    loop
        -- The rows are locked before anything is written, and no more than are wanted:
        -- an update that joins its own candidates may, under some plans, take them all.
        select array_agg(d.job_id), count(d.lease_owner), max(d.available_at)
        into v_due, v_lapsed, v_at
        from (
            select l.job_id, l.available_at, l.lease_owner
            from live_job as l
            where
                l.queue = p_queue
                and l.available_at <= v_now
                and (l.available_at, l.job_id) > (v_at, v_job_id)
                and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
                and (l.attempt < l.max_attempts or v_retire > 0)
            order by l.available_at, l.job_id
            limit v_wanted
            for update skip locked
        ) as d;
        exit when v_due is null;

        if v_lapsed > 0 then
            v_retire := v_retire - _retire(v_due, v_retire);
            insert into attempt (
                job_id, leased_at, ended_at, attempt, max_attempts,
                worker, outcome, lease_token_hash
            )
            select
                l.job_id, l.leased_at, clock_timestamp(), l.attempt, l.max_attempts,
                l.lease_owner, 'lease_expired', l.lease_token_hash
            from live_job as l
            where
                l.job_id = any (v_due)
                and num_nulls(l.leased_at, l.lease_owner, l.lease_token_hash) = 0
                and l.attempt < l.max_attempts
            on conflict (job_id, attempt) do nothing;
        end if;

        -- No column of an index changes: the new version stays in its page and the
        -- index is left alone.
        v_now := clock_timestamp();
        return query
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = v_now,
                lease_expires_at = v_now + v_lease,
                lease_owner = v_caller,
                lease_token_hash = sha256(convert_to(d.lease_token, 'UTF8'))
            from (
                select
                    u.job_id, u.ordinality,
                    'job_lease_' || encode(
                        uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()),
                        'hex'
                    ) as lease_token
                from unnest(v_due) with ordinality as u (job_id)
            ) as d
            join job as j on j.job_id = d.job_id
            where l.job_id = d.job_id and l.attempt < l.max_attempts
            returning
                d.ordinality, d.lease_token, j.kind, j.payload, j.created_at,
                l.job_id, l.queue, l.attempt, l.max_attempts, l.lease_expires_at
        )
        select
            r.job_id, r.queue::text, r.kind::text, r.payload::jsonb,
            r.attempt, r.max_attempts,
            r.lease_token, r.lease_expires_at::timestamptz, r.created_at::timestamptz
        from leased as r
        order by r.ordinality;
        get diagnostics v_leased = row_count;

        -- Rows that could not be leased were retired or passed over: look behind them.
        exit when v_leased = cardinality(v_due) or cardinality(v_due) < v_wanted;
        v_job_id := v_due[cardinality(v_due)];
        v_wanted := v_wanted - v_leased;
    end loop;
end;
$$;
comment on function claim(text, integer) is
'Leases up to p_limit due jobs of a queue, oldest due first, each with its attempt '
'(the fencing token) and a fresh lease token; no row where none is due. Reclaims '
'lapsed leases and ends up to 64 jobs whose last one lapsed. Refuses an undeclared '
'caller (42501), an undeclared queue (LJ003), a limit outside 1 to 1000 (LJ007).';
