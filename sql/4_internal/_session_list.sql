-- Only a member of pg_read_all_stats sees since when a transaction is open.
create or replace function _session_list()
returns table (
    name text, place text, pid integer, since timestamptz, xmin xid, xid xid,
    owner text, is_remote boolean, remedy text
)
language sql stable as $$
    select 'session ' || s.pid, s.pid::text, s.pid, s.xact_start, s.backend_xmin,
        s.backend_xid, s.usename::text, r.pid is not null,
        format('select pg_terminate_backend(%s)', s.pid)
    from pg_stat_activity as s
    left join pg_stat_replication as r on r.pid = s.pid
    where s.pid <> pg_backend_pid()
        and (
            (s.datname = current_database() and s.usesysid is not null)
            -- A session that is only connecting is in no database, with a snapshot, too.
            or r.pid is not null
        )
    union all
    select 'prepared transaction ' || x.gid,
        (
            select l.virtualtransaction
            from pg_locks as l
            where l.pid is null and l.transactionid = x.transaction
        ),
        null, x.prepared, x.transaction, x.transaction, x.owner::text, false,
        format('rollback prepared %L', x.gid)
    from pg_prepared_xacts as x
    where x.database = current_database()
    union all
    select 'replication slot ' || r.slot_name, null, null, null, r.xmin, null,
        case when r.active then 'active' else 'not active' end, true,
        case
            when not r.active
                then format('select pg_drop_replication_slot(%L)', r.slot_name)
        end
    from pg_replication_slots as r
    where r.xmin is not null
$$;
comment on function _session_list() is
'Sessions and prepared transactions of this database, standbys, and slots that hold a '
'snapshot, each with the statement that ends it.';
