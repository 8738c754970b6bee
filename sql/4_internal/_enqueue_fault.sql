-- Nearly every job passes without the function in full. The queue is looked at where
-- it is not declared. A text of 256 bytes cannot have 129 levels or a number beyond
-- 1e308. The text is made once, because that is most of the cost of a larger payload.
create or replace function _enqueue_fault(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer
)
returns text
language sql stable as $$
    select case
        when
            p_available_at is null
            and p_max_attempts between 1 and 100
            and jsonb_typeof(p_payload) = 'object'
            and pg_column_compression(p_payload) is null
            and pg_column_size(p_payload) <= 4096
            and octet_length(p_kind || p_idempotency_key) <= 256
            and (p_kind || ' ' || p_idempotency_key) collate "C"
            ~ '^[A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+$'
            and case width_bucket(
                octet_length(p_payload::text), array[257, 262145]
            )
                when 0 then true
                when 1 then not _enqueue_is_beyond(p_payload)
                else false
            end
            then null
        else _enqueue_fault_in_full(
            p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
            p_max_attempts
        )
    end
$$;
comment on function _enqueue_fault(text, text, jsonb, text, timestamptz, integer) is
'What is wrong with the arguments of enqueue, by argument and limit; NULL: nothing, '
'unless the queue is not declared.';
