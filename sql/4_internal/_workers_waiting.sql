create or replace function _workers_waiting(p_queue text)
returns integer
language sql
stable
as $$
    select count(*)::integer
    from pg_locks as l
    where
        l.locktype = 'advisory'
        and l.objsubid = 1
        and l.mode = 'ShareLock'
        and l.granted
        and l.database = (
            select d.oid from pg_database as d where d.datname = current_database()
        )
        and (l.classid::bigint << 32) | l.objid::bigint = _advisory_key(p_queue)
$$;
comment on function _workers_waiting(text) is
'How many sessions wait for a queue, as wait_key has them.';
