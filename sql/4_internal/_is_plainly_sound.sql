-- Most jobs are small, and the length of all their text together then proves every
-- limit there is: of each name, of the payload, of its depth, and of every number.
-- What does not pass here is not refused yet; _job_fault says.
create or replace function _is_plainly_sound(
    p_kind text,
    p_payload jsonb,
    p_idempotency_key text,
    p_available_at timestamptz,
    p_max_attempts integer
)
returns boolean
language sql
stable
as $$
    select
        p_available_at is null
        and p_max_attempts between 1 and 100
        and jsonb_typeof(p_payload) = 'object'
        and pg_column_size(p_payload || '{}') <= 256
        and length(concat(p_kind, p_idempotency_key, p_payload)) <= 256
        and (p_kind || ' ' || p_idempotency_key) collate "C"
        ~ '^[A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+$'
$$;
comment on function _is_plainly_sound(text, jsonb, text, timestamptz, integer) is
'Whether a small job to run at once is within every limit; its queue is not looked at.';
