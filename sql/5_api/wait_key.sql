create or replace function wait_key(p_queue text)
returns bigint
language plpgsql
stable
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
begin
    perform _require_queue(p_queue);
    return (select _advisory_key(p_queue) from instance as i where i.notify);
end;
$$;
comment on function wait_key(text) is
'The advisory lock that a waiting worker holds, shared and by the try form, while it '
'listens on the channel named as the schema for the queue''s name; NULL where the '
'Instance sends no notifications. Refuses an undeclared queue (LJ003).';
