-- Whoever only waits for such a lock makes everybody else wait behind it.
create or replace function _is_shut()
returns boolean
language sql
stable
as $$
    select exists (
        select
        from pg_locks as l
        join pg_class as c on c.oid = l.relation
        where
            l.locktype = 'relation'
            and l.mode = 'AccessExclusiveLock'
            and l.pid is distinct from pg_backend_pid()
            and l.database = (
                select d.oid from pg_database as d where d.datname = current_database()
            )
            and c.relnamespace = (
                select i.relnamespace
                from pg_class as i
                where i.oid = 'instance'::regclass
            )
    )
$$;
comment on function _is_shut() is
'Whether another session has locked a table or an index of the Instance, or waits to, '
'so that even reading it would wait.';
