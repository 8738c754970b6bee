create or replace function wait_key(p_queue text)
returns bigint
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_policy();
    perform _require_queue(p_queue);
    return (select _queue_key(p_queue) from instance as i where i.notify);
end;
$$;
comment on function wait_key(text) is
'The advisory lock that a waiting worker holds, shared and by the try form, while it '
'listens on the channel named as the schema for the queue''s name; NULL where the '
'Instance sends no notifications. Refuses an undeclared queue (LJ003), and every call '
'while no policy is stored (LJ008).';
