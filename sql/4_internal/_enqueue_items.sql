-- A CASE decides before each cast, so that no item can raise and spoil its neighbours.
-- The planner inlines this into the statement that reads it.
create or replace function _enqueue_items(p_jobs jsonb)
returns table (
    "position" integer, queue text, kind text, payload jsonb, idempotency_key text,
    available_at timestamptz, max_attempts integer, is_valid boolean
)
language sql stable rows 1000 as $$
    select f.position, f.queue, f.kind, f.payload, f.idempotency_key,
        f.available_at, f.max_attempts,
        f.is_known
        and f.queue is not null
        and (f.available_at is not null or f.is_at_once)
        and _enqueue_fault(
            f.queue, f.kind, f.payload, f.idempotency_key, f.available_at,
            f.max_attempts
        ) is null
    from (
        select i.ordinality::integer as position,
            case when jsonb_typeof(i.value -> 'queue') = 'string'
                then i.value ->> 'queue'
            end as queue,
            case when jsonb_typeof(i.value -> 'kind') = 'string'
                then i.value ->> 'kind'
            end as kind,
            i.value -> 'payload' as payload,
            case when jsonb_typeof(i.value -> 'idempotency_key') = 'string'
                then i.value ->> 'idempotency_key'
            end as idempotency_key,
            case when jsonb_typeof(i.value -> 'available_at') = 'string'
                then _enqueue_instant(i.value ->> 'available_at')
            end as available_at,
            coalesce(i.value -> 'available_at', 'null') = 'null' as is_at_once,
            case
                when not i.value ? 'max_attempts'
                    then 3
                when i.value -> 'max_attempts' between '1' and '100'
                    and (i.value -> 'max_attempts')::numeric % 1 = 0
                    then (i.value -> 'max_attempts')::integer
            end as max_attempts,
            case when jsonb_typeof(i.value) = 'object'
                then i.value - array[
                    'queue', 'kind', 'payload', 'idempotency_key', 'available_at',
                    'max_attempts'
                ] = '{}'
                else false
            end as is_known
        from jsonb_array_elements(p_jobs) with ordinality as i
        offset 0
    ) as f
$$;
comment on function _enqueue_items(jsonb) is
'The items of enqueue_many in input order, typed strictly, and whether each is valid.';
