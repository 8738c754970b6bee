-- Of the server, of the database, and of each role that is or may act as a declared
-- caller. A superuser's own settings stop nobody.
create or replace function _session_settings()
returns table (
    place text, role oid, setting text, value text, is_harmful boolean, remedy text
)
language sql stable as $$
    with stored as (
        select s.setdatabase <> 0 as is_here, s.setrole as role,
            o.option_name as setting, o.option_value as value
        from pg_db_role_setting as s
        cross join pg_options_to_table(s.setconfig) as o
        left join pg_database as d on d.oid = s.setdatabase
        where coalesce(d.datname, current_database()) = current_database()
            and (
                s.setrole = 0
                or exists (
                    select from caller as c
                    join pg_roles as r on r.rolname = c.caller
                    join pg_roles as u on u.oid = s.setrole and not u.rolsuper
                    where pg_has_role(u.oid, r.oid, 'member')
                )
            )
        union all
        select null, 0, s.name, concat(s.reset_val, s.unit)
        from pg_settings as s
        where s.source in ('configuration file', 'command line')
    )
    select
        case
            when s.is_here is null then 'the server'
            else format(replace(t.place, '$I', '$s'), t.role, current_database())
        end,
        s.role, s.setting, s.value,
        (
            v.is_read_only
            or (
                s.setting in ('statement_timeout', 'transaction_timeout')
                and v.lasts < interval '100 milliseconds'
            )
        ) is true,
        case
            when s.is_here is null
                then 'take it out of the server''s configuration, and reload that'
            else format(
                case
                    when v.is_read_only then 'begin read write; alter %s reset %s; commit'
                    else 'alter %s reset %s'
                end, format(t.place, t.role, current_database()), s.setting
            )
        end
    from stored as s
    cross join lateral (
        select pg_get_userbyid(s.role),
            concat_ws(
                ' in ', case
                    when s.role <> 0 then 'role %1$I' when not s.is_here then 'role all'
                end,
                case when s.is_here then 'database %2$I' end
            )
    ) as t (role, place)
    cross join lateral (
        select
            case
                when s.setting = 'default_transaction_read_only' then s.value::boolean
            end,
            -- A number without a unit is in milliseconds, and 0 is no limit.
            nullif(
                case
                    when s.setting not in (
                        'statement_timeout', 'transaction_timeout', 'lock_timeout',
                        'idle_in_transaction_session_timeout', 'idle_session_timeout'
                    ) then null
                    when s.value ~ '^[0-9]+$' then s.value || ' ms'
                    else s.value
                end::interval, '0'
            )
    ) as v (is_read_only, lasts)
    where v.is_read_only or v.lasts is not null
$$;
comment on function _session_settings() is
'Read-only defaults and timeouts with which the sessions of declared callers begin, '
'and whether their calls fail by it.';
