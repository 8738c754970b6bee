-- The names are proved together, and told apart only when one is wrong. The payload is
-- looked at in an order that keeps hostile documents cheap: its size once detoasted
-- (what the concatenation is for; JSON is never stored in eight times its text), then
-- depth, which bounds the walk, then the size and the digits of every number; and only
-- then is text made of it.
create or replace function _job_fault(
    p_queue text,
    p_kind text,
    p_payload jsonb,
    p_idempotency_key text,
    p_available_at timestamptz,
    p_max_attempts integer
)
returns text
language sql
stable
as $$
    select case
        when (
            length(p_queue) <= 128
            and length(p_kind) <= 256
            and length(p_idempotency_key) <= 256
            and (p_queue || ' ' || p_kind || ' ' || p_idempotency_key) collate "C"
            ~ '^[A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+$'
        ) is not true
            then _fault_of_names(p_queue, p_kind, p_idempotency_key)
        when (p_max_attempts between 1 and 100) is not true
            then 'max_attempts must be from 1 to 100'
        when (
            p_available_at >= '0001-01-01 00:00:00+00'
            and p_available_at < '10000-01-01 00:00:00+00'
        ) is false
            then 'available_at must be finite, from the year 1 to before the year 10000'
        when (jsonb_typeof(p_payload) = 'object') is not true
            then 'payload must be a JSON object'
        when pg_column_size(p_payload || '{}') > 2097152
            then 'payload must be at most 262144 bytes as text'
        when jsonb_path_match(
            p_payload,
            'strict exists($.**{129}) || exists(
                $.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))
            )'
        )
            then 'payload must be nested at most 128 levels deep, and hold no number '
                 'beyond 1e308'
        when pg_column_size(p_payload || '{}') > 8192
            and _has_too_many_digits(p_payload)
            then 'payload must be at most 262144 bytes as text'
        when octet_length(p_payload::text) > 262144
            then 'payload must be at most 262144 bytes as text'
    end
$$;
comment on function _job_fault(text, text, jsonb, text, timestamptz, integer) is
'What is wrong with the arguments of enqueue, by argument and limit; NULL: nothing.';
