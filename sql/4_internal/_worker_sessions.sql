-- Who another session has become by SET ROLE cannot be seen, so whoever may take a
-- worker's role counts; a superuser may take any, and tells nothing. From 16 on who
-- made a role is a member, and may not take it.
create or replace function _worker_sessions()
returns table (worker text, sessions integer)
language sql
stable
as $$
    select c.caller::text, count(s.pid)::integer
    from caller as c
    left join pg_roles as r on r.rolname = c.caller
    left join (
        select a.pid, a.usesysid
        from pg_stat_activity as a
        join pg_roles as u on u.oid = a.usesysid
        where
            a.datname = current_database()
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
    group by c.caller
$$;
comment on function _worker_sessions() is
'For each declared worker how many sessions in this database may act as it.';
