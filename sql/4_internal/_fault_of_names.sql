-- PL/pgSQL, so that it stays a call: inlined, it would be set up by every enqueue.
create or replace function _fault_of_names(
    p_queue text,
    p_kind text,
    p_idempotency_key text
)
returns text
language plpgsql
stable
as $$
begin
    return case
        when not _is_name(p_queue, 128)
            then 'queue must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_kind, 256)
            then 'kind must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_idempotency_key, 256)
            then 'idempotency_key must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
    end;
end;
$$;
comment on function _fault_of_names(text, text, text) is
'Which of the names that enqueue was given is malformed, and its limit; NULL: none.';
