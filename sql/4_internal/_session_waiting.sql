create or replace function _session_waiting(p_queue text)
returns integer language plpgsql stable as $$
begin
    return (
        select count(*)::integer
        from pg_locks as l
        where l.locktype = 'advisory'
            and l.objsubid = 1
            and l.mode = 'ShareLock'
            and l.granted
            and l.database = (
                select d.oid from pg_database as d where d.datname = current_database()
            )
            and (l.classid::bigint << 32) | l.objid::bigint = _queue_key(p_queue)
    );
exception when insufficient_privilege then
    return null;
end;
$$;
comment on function _session_waiting(text) is
'How many sessions wait for a queue, as wait_key has them; NULL where pg_locks is '
'hidden.';
