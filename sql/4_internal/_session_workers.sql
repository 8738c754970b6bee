-- What another session has become by SET ROLE cannot be seen, so each that may take a
-- worker's role counts. A superuser may take any and does not count. From 16 on the
-- maker of a role is a member, and may not take it.
create or replace function _session_workers()
returns table (worker text, sessions integer)
language plpgsql stable as $$
begin
    return query
    select c.caller::text, count(s.pid)::integer
    from caller as c
    left join pg_roles as r on r.rolname = c.caller
    left join (
        select a.pid, a.usesysid
        from pg_stat_activity as a
        join pg_roles as u on u.oid = a.usesysid
        where a.datname = current_database()
            and not u.rolsuper
            and a.pid <> pg_backend_pid()
    ) as s on pg_has_role(
        s.usesysid, r.oid,
        case
            when current_setting('server_version_num')::integer < 160000 then 'member'
            else 'set'
        end
    )
    where c.is_worker
    group by c.caller;
exception when insufficient_privilege then
    return query select c.caller::text, null::integer from caller as c where c.is_worker;
end;
$$;
comment on function _session_workers() is
'For each declared worker how many sessions in this database may act as it; NULL where '
'pg_stat_activity is hidden.';
