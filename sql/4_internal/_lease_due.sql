-- Runs under the planner settings of claim, which alone calls it.
--
-- The claim floor. What lies in the index before the last row handed out is running or
-- dead, by the ten thousand while a snapshot is held elsewhere. After a slow walk from
-- the start the session remembers in a setting where it was. That may delay what lies
-- below until the next walk, due after 50 times as long as the last one took; after a
-- second slow one, for which what had died since should be out of the way, after a
-- second at least; and within 30 seconds whatever the setting says.
create or replace function _lease_due(
    p_queue text,
    p_limit integer,
    p_caller text,
    p_lease interval,
    p_secret bytea,
    p_floor text
)
returns setof leased_job
language plpgsql
volatile
as $$
declare
    v_setting text        := current_setting(p_floor, true);
    v_hint    text[]      := _claim_floor(v_setting);
    v_full_us bigint      := v_hint[3]::bigint;
    v_took_us bigint      := least(v_hint[4]::bigint, 600000);
    v_now     timestamptz := clock_timestamp();
    v_us      bigint      := (date_part('epoch', v_now) * 1000000)::bigint;
    v_slow    integer     := v_hint[5]::integer;
    v_is_slow boolean     := false;
    v_read    bigint      := _entries_read();
    v_from_at timestamptz := timestamptz '-infinity';
    v_from_id uuid        := uuid '00000000-0000-0000-0000-000000000000';
    v_rows    tid[];
    v_due     uuid[];
    v_due_at  timestamptz;
    v_lapsed  bigint;
    v_wanted  integer     := p_limit;
    v_leased  integer;
    v_retire  integer     := 64;
begin
    if
        v_us - v_full_us
        between 0 and greatest(50 * v_took_us, (v_slow - 1) * 1000000) - 1
    then
        v_is_slow := true;
        v_from_at := timestamptz 'epoch' + v_hint[1]::bigint * interval '1 microsecond';
        v_from_id := v_hint[2]::uuid;
    end if;

    loop
        -- The rows are locked before anything is written, and no more than are wanted:
        -- an update that joins its own candidates may, under some plans, take them all.
        select
            array_agg(d.ctid), array_agg(d.job_id), max(d.available_at),
            count(d.lease_owner)
        into v_rows, v_due, v_due_at, v_lapsed
        from (
            select l.ctid, l.job_id, l.available_at, l.lease_owner
            from live_job as l
            where
                l.queue = p_queue
                and l.available_at <= v_now
                and (l.available_at, l.job_id) > (v_from_at, v_from_id)
                and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
                and (l.attempt < l.max_attempts or v_retire > 0)
            order by l.available_at, l.job_id
            limit v_wanted
            for update skip locked
        ) as d;
        if v_from_at = '-infinity' then
            v_full_us := v_us;
            v_slow := case when v_is_slow then v_slow when v_slow = 1 then 2 else 1 end;
            v_took_us
            := (date_part('epoch', clock_timestamp() - v_now) * 1000000)::bigint;
            v_is_slow
            := _entries_read() - v_read - coalesce(cardinality(v_due), 0) > 100;
        end if;
        if v_due is null then
            exit when v_from_at = '-infinity' or v_leased is not null;
            exit when v_took_us >= 2000 and v_us - v_full_us < 50 * v_took_us;
            v_from_at := timestamptz '-infinity';
            v_now := clock_timestamp();
            v_read := _entries_read();
            continue;
        end if;
        v_from_at := v_due_at;
        v_from_id := v_due[cardinality(v_due)];
        if v_lapsed > 0 then
            v_retire := v_retire - _reclaim(v_due, v_retire);
        end if;

        -- No column of an index changes: the new version stays in its page and the
        -- index is left alone. The rows are ours, so they are where they were; found by
        -- place, and each job by its key behind a fence, they leave the planner nothing
        -- to choose, whatever it believed of the tables when it planned this.
        v_now := clock_timestamp();
        return query
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = v_now,
                lease_expires_at = v_now + p_lease,
                lease_owner = p_caller,
                lease_token_hash
                = sha256(convert_to(_lease_token(p_secret, l.job_id), 'UTF8'))
            where l.ctid = any (v_rows) and l.attempt < l.max_attempts
            returning l.*
        )
        select
            l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, _lease_token(p_secret, l.job_id),
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j
        order by l.available_at, l.job_id;
        get diagnostics v_leased = row_count;

        -- Rows that could not be leased were retired or passed over: look behind them.
        exit when v_leased = cardinality(v_due) or cardinality(v_due) < v_wanted;
        v_wanted := v_wanted - v_leased;
    end loop;

    -- Where nothing was found the floor follows a second behind, for what was enqueued
    -- before now and commits later. A rollback puts the setting back, too.
    if v_is_slow then
        if v_due is null then
            v_from_at := greatest(v_from_at, v_now - interval '1 second');
        end if;
        v_setting := set_config(
            p_floor,
            concat_ws(
                ' ', (date_part('epoch', v_from_at) * 1000000)::bigint,
                encode(uuid_send(v_from_id), 'hex'), v_full_us, v_took_us,
                v_slow
            ),
            false
        );
    elsif v_setting <> '' then
        v_setting := set_config(p_floor, '', false);
    end if;
end;
$$;
comment on function _lease_due(text, integer, text, interval, bytea, text) is
'Leases up to p_limit due jobs for claim, reclaims lapsed leases among them, and keeps '
'the claim floor of the session.';
