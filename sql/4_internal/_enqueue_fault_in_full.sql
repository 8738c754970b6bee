-- The payload is looked at in an order that keeps hostile documents cheap: its size
-- once detoasted (what the concatenation is for; stored JSON is at most eight times its
-- text), then depth, which bounds the walk, then the size of every number. Ten bytes of
-- a number can be sixteen thousand digits of text: numbers of 64 characters and more
-- are counted, each written out by itself. Only then is text made of the whole.
create or replace function _enqueue_fault_in_full(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer
)
returns text
language plpgsql stable as $$
declare
    v_too_long constant text := 'payload must be at most 262144 bytes as text';
    v_fault    text          := case
        when not _is_name(p_queue, 128)
            then 'queue must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_kind, 256)
            then 'kind must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_idempotency_key, 256)
            then 'idempotency_key must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
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
            then v_too_long
        when _enqueue_is_beyond(p_payload)
            then 'payload must be nested at most 128 levels deep, and hold no number '
                 'beyond 1e308'
    end;
begin
    if v_fault is not null then
        return v_fault;
    end if;
    if pg_column_size(p_payload || '{}') > 8192 then
        perform
        from (
            select
            from jsonb_path_query(
                p_payload, 'strict $.** ? (@.type() == "number")'
            ) as n
            where length(n::text) >= 64
            limit 4096
        ) as long
        having count(*) = 4096;
        if found then
            return v_too_long;
        end if;
    end if;
    if octet_length(p_payload::text) > 262144 then
        return v_too_long;
    end if;
    return null;
end;
$$;
comment on function
_enqueue_fault_in_full(text, text, jsonb, text, timestamptz, integer) is
'What _enqueue_fault returns for a job that is not small, or not plainly sound.';
