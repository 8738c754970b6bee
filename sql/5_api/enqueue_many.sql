create or replace function enqueue_many(p_jobs jsonb)
returns setof enqueued_item
language plpgsql security definer
set search_path from current as $$
declare
    v_caller text        := _caller();
    v_queues text[];
    v_now    timestamptz;
    v_random uuid        := gen_random_uuid();
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
    -- A document from a table may be compressed: the concatenation unpacks it.
    if pg_column_size(
        case when pg_column_compression(p_jobs) is null then p_jobs else p_jobs || '[]' end
    ) > 16777216 then
        raise exception using errcode = 'LJ007',
            message = 'jobs must be at most 16777216 bytes (16 MB) as jsonb',
            hint    = 'Divide them into several calls.';
    end if;
    if jsonb_array_length(p_jobs) not between 1 and 1000 then
        raise exception using errcode = 'LJ007', message = 'jobs must be 1 to 1000 items';
    end if;

    -- The clock is read behind the locks on the tables.
    lock table job, live_job in row exclusive mode;
    v_now := clock_timestamp();

    -- An item's id tells its position, and its instant is one microsecond after its
    -- predecessor's: input order is order of enqueueing. Their random half is drawn
    -- once.
    v_ids := array(
        select _enqueue_job_id(v_now + n * interval '1 microsecond', v_random)
        from generate_series(1, jsonb_array_length(p_jobs)) as n
    );
    loop
        -- Keys go in sorted, so that no two batches wait for each other.
        with fresh as (
            insert into job (
                job_id, created_at, available_at, max_attempts,
                producer, queue, kind, idempotency_key, payload
            )
            select v_ids[i.position], v_now + i.position * interval '1 microsecond',
                i.available_at, i.max_attempts,
                v_caller, i.queue, i.kind, i.idempotency_key, i.payload
            from (
                select distinct on (f.idempotency_key collate "C") f.*
                from _enqueue_items(p_jobs) as f
                where f.is_valid and f.queue = any (v_queues)
                order by f.idempotency_key collate "C", f.position
            ) as i
            on conflict (producer, idempotency_key) do nothing
            returning
                job_id, available_at, created_at, max_attempts, queue,
                pg_column_size(payload) as payload_bytes
        ),
        -- In the order of their ids, which is that of both indexes and of claims.
        live as (
            insert into live_job (
                job_id, available_at, attempt, max_attempts, payload_bytes, queue
            )
            select f.job_id, greatest(f.available_at, f.created_at), 0, f.max_attempts,
                f.payload_bytes, f.queue
            from fresh as f
            order by f.job_id
            returning queue
        )
        select count(*)::integer, array_agg(distinct l.queue)
        into v_count, v_filled
        from live as l;
        perform _queue_wake(q.queue)
        from unnest(v_filled) as q (queue)
        where _queue_is_awaited(q.queue);
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
                case when r.outcome in ('created', 'existing') then j.job_id end,
                r.outcome
            )::enqueued_item
            order by i.position
        )
        into v_items
        from (
            select f.*, f.is_valid and f.queue = any (v_queues) as ok
            from _enqueue_items(p_jobs) as f
            offset 0
        ) as i
        left join lateral _enqueue_known_job(
            v_caller, i.queue, i.kind, i.payload, i.idempotency_key, i.available_at,
            i.max_attempts
        ) as j on i.ok
        cross join lateral (
            select case
                when not i.ok then 'invalid_job'
                when j.job_id = v_ids[i.position] then 'created'
                when j.is_same then 'existing'
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
'returns one row an item in input order; a bad item spoils no other. Refuses an '
'undeclared caller (42501), a document that is not an array (LJ001), other than 1 to '
'1000 items or more than 16 MB (LJ007), and every call while no policy is stored '
'(LJ008).';
