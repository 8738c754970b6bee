create or replace function enqueue_many(p_jobs jsonb)
returns setof enqueued_item
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
as $$
declare
    v_caller text        := _caller();
    v_queues text[];
    v_now    timestamptz := clock_timestamp();
    v_ids    uuid[];
    v_new    integer     := 0;
    v_count  integer;
    v_filled text[];
    v_items  enqueued_item[];
begin
    perform _require_producer();
    select i.queues into v_queues from instance as i;
    if (jsonb_typeof(p_jobs) = 'array') is not true then
        raise exception using errcode = 'LJ001', message = 'jobs must be a JSON array';
    end if;
    if jsonb_array_length(p_jobs) not between 1 and 1000 then
        raise exception using
            errcode = 'LJ007',
            message = 'jobs must be 1 to 1000 items';
    end if;

    -- An item's id tells its position, and its instant is one microsecond after its
    -- predecessor's: input order is order of enqueueing.
    v_ids := array(
        select _new_job_id(v_now + make_interval(secs => n * 1e-6))
        from generate_series(1, jsonb_array_length(p_jobs)) as n
    );
    loop
        -- Keys go in sorted, so that no two batches wait for each other.
        with fresh as (
            insert into job (
                job_id, created_at, available_at, max_attempts,
                producer, queue, kind, idempotency_key, payload
            )
            select
                v_ids[i.position], v_now + make_interval(secs => i.position * 1e-6),
                i.available_at, i.max_attempts,
                v_caller, i.queue, i.kind, i.idempotency_key, i.payload
            from (
                select distinct on (f.idempotency_key collate "C") f.*
                from _jobs_from(p_jobs) as f
                where f.is_valid and f.queue = any (v_queues)
                order by f.idempotency_key collate "C", f.position
            ) as i
            on conflict (producer, idempotency_key) do nothing
            returning job_id, available_at, created_at, max_attempts, queue
        ),
        live as (
            insert into live_job (job_id, available_at, attempt, max_attempts, queue)
            select
                f.job_id, greatest(f.available_at, f.created_at), 0, f.max_attempts,
                f.queue
            from fresh as f
            returning queue
        )
        select count(*)::integer, array_agg(distinct l.queue)
        into v_count, v_filled
        from live as l;
        perform _wake(q.queue)
        from unnest(v_filled) as q (queue)
        where _is_awaited(q.queue);
        v_new := v_new + v_count;
        if v_new = cardinality(v_ids) then
            return query
            select n, v_ids[n], 'created'
            from generate_series(1, cardinality(v_ids)) as n;
            return;
        end if;

        -- As in enqueue, a statement of its own; an item with neither a job nor a
        -- fault was purged in between, and the batch goes round again.
        select array_agg(
            (
                i.position,
                case when r.outcome in ('created', 'existing') then r.job_id end,
                r.outcome
            )::enqueued_item
            order by i.position
        )
        into v_items
        from (
            select f.*, f.is_valid and f.queue = any (v_queues) as ok
            from _jobs_from(p_jobs) as f
            offset 0
        ) as i
        left join lateral (
            select n.*
            from (
                select k.*
                from job as k
                where
                    i.ok
                    and k.producer = v_caller
                    and k.idempotency_key = i.idempotency_key
                offset 0
            ) as n
            order by n.job_id desc
            limit 1
        ) as j on true
        cross join lateral (
            select
                j.job_id,
                case
                    when not i.ok then 'invalid_job'
                    when j.job_id = v_ids[i.position] then 'created'
                    when
                        (j.queue, j.kind, j.payload, j.max_attempts)
                        = (i.queue, i.kind, i.payload, i.max_attempts)
                        and j.available_at is not distinct from i.available_at
                        then 'existing'
                    when j.job_id is not null then 'conflict'
                end as outcome
        ) as r;
        exit when not exists (select from unnest(v_items) as u where u.outcome is null);
    end loop;
    return query select u.* from unnest(v_items) as u;
end;
$$;
comment on function enqueue_many(jsonb) is
'Makes an array of jobs durable, each an object with the fields of enqueue, and '
'answers one row an item in input order; a bad item spoils no other. Refuses an '
'undeclared caller (42501), what is no array (LJ001), and other than 1 to 1000 items '
'(LJ007).';
