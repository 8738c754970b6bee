-- The table's oid tells this Instance from another in the same database. The inliner
-- makes a constant of it.
create or replace function _queue_key(p_queue text)
returns bigint
language sql stable as $$
    select hashtextextended(p_queue collate "C", 'instance'::regclass::oid::bigint)
$$;
comment on function _queue_key(text) is
'The number of a queue: its advisory lock, and the name of its claim floor.';
