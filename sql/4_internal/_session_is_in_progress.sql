-- pg_locks names no savepoint that was released, though rows go on naming it. age()
-- counts from this transaction's own number if it has one: its own savepoints are left
-- out, as is what is no transaction's number, which pg_xact_status may refuse.
create or replace function _session_is_in_progress(p_transaction xid)
returns boolean
language sql stable as $$
    select coalesce(
        case
            when age(p_transaction) between 1 and 2147483646 and f.n > 2
                then pg_xact_status(f.n::text::xid8) = 'in progress'
        end,
        false
    )
    from pg_snapshot_xmax(pg_current_snapshot()) as x (id)
    cross join lateral (
        select x.id::text::bigint + age(x.id::xid) - age(p_transaction) as n
    ) as f
$$;
comment on function _session_is_in_progress(xid) is
'Whether another transaction, or a part of it, is still open.';
