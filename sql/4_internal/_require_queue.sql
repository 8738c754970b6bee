create or replace function _require_queue(p_queue text)
returns void
language plpgsql stable as $$
begin
    if not exists (select from queue as q where q.queue = p_queue collate "C") then
        raise exception using errcode = 'LJ003',
            message = 'queue is not declared',
            hint    = _queue_hint(p_queue);
    end if;
end;
$$;
comment on function _require_queue(text) is
'Refuses a queue that is not declared (LJ003).';
