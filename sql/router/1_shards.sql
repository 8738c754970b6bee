-- The router of a fleet: a database whose functions run on the shards, by PL/Proxy.
-- Loaded by a superuser, with the Instance's schema in the search_path, and with the
-- number of shards in the setting lenso_jobs.shards.
do $$
declare
    v_shards integer := current_setting('lenso_jobs.shards')::integer;
begin
    execute format(
        'create or replace function _shards() returns integer[] '
        'language sql immutable parallel safe as %L',
        format('select %L::integer[]', array(select generate_series(0, v_shards - 1)))
    );
end $$;
comment on function _shards() is 'The numbers of the shards.';

-- PostgreSQL's own hash of a text may differ between its versions; clients in other
-- languages compute this one, too. Stable, as convert_to is, and one expression: so the
-- planner inlines it. As a call it takes longer than all else that the router does.
create or replace function _shard_of(p_key text)
returns integer
language sql stable parallel safe as $$
    select
        ('x' || left(encode(sha256(convert_to(coalesce(p_key, ''), 'UTF8')), 'hex'), 8))
        ::bit(32)::integer & (cardinality(_shards()) - 1)
$$;
comment on function _shard_of(text) is
'The shard of a key: the first four bytes of its SHA-256 as a big-endian number, '
'modulo the number of shards.';

do $do$
begin
    execute format(
        $$
create or replace function _shard_server(
    p_shards integer[], out shard integer, out item text
)
returns setof record
language plproxy as %L
        $$,
        format(
            $$
    cluster %L;
    split p_shards;
    run on p_shards;
    select (p_shards)[1]::integer as shard, concat_ws(
        ' ', c.system_identifier, d.oid, extract(epoch from pg_postmaster_start_time())
    ) as item
    from pg_control_system() as c
    join pg_database as d on d.datname = current_database();
            $$,
            current_schema() || '_shards'
        )
    );
end $do$;
comment on function _shard_server(integer[]) is
'Which server and database a shard is; fleet check compares it.';

-- PL/Proxy puts its own words before the shard's message. It reports each failure of a
-- connection as an internal error.
create or replace function _shard_refused(
    p_sqlstate text, p_message text, p_detail text, p_hint text
)
returns void
language plpgsql
set search_path from current as $$
declare
    v_state   text := p_sqlstate;
    v_message text := rtrim(
        regexp_replace(
            regexp_replace(p_message, '^[^[]*\[[^]]*\] REMOTE [A-Z]+: ', ''),
            '^PL/Proxy function [^ ]*: ', 'a shard cannot be reached: '
        ), E'\n'
    );
    v_detail  text := regexp_replace(p_detail, '^Remote detail: ', '');
    v_hint    text := regexp_replace(p_hint, '^Remote hint: ', '');
begin
    if p_sqlstate = 'XX000' and p_message !~ '\] REMOTE [A-Z]+: ' then
        v_state := '08006';
        if p_message ~ 'password|authentication|pg_hba|not permitted to log in' then
            v_hint := 'The router logs in to the shards as the role that calls. Name the '
                'password of a declared caller in passwords and run lenso-jobs fleet '
                'configure. Other roles connect to the shards, or need pg_hba.conf there.';
        end if;
    end if;
    -- An option that is given may not be NULL, and an empty one is shown.
    if v_detail = '' and v_hint = '' then
        raise exception using errcode = v_state, message = v_message;
    elsif v_detail = '' then
        raise exception using errcode = v_state, message = v_message, hint = v_hint;
    elsif v_hint = '' then
        raise exception using errcode = v_state, message = v_message, detail = v_detail;
    end if;
    raise exception using
        errcode = v_state, message = v_message, detail = v_detail, hint = v_hint;
end;
$$;
comment on function _shard_refused(text, text, text, text) is
'Raises what a shard, or the connection to it, has refused, in the shard''s own words.';

-- A role with USAGE on a foreign server may map itself to any role of that server. A
-- shard that trusts the router's address would let it in as that role. It may also drop
-- its own mapping, even by DROP OWNED: that locks out every session of the role.
create or replace function _shard_mapping_kept()
returns event_trigger
language plpgsql
set search_path from current as $$
declare
    v_server  text := current_schema() || '_shards';
    v_changes boolean;
begin
    if tg_event = 'sql_drop' then
        v_changes := exists (
            select
            from pg_event_trigger_dropped_objects() as d
            where d.object_type = 'user mapping' and v_server = any (d.address_args)
        );
    else
        v_changes := exists (
            select
            from pg_event_trigger_ddl_commands() as c
            join pg_user_mappings as m on m.umid = c.objid
            where m.srvname = v_server
        );
    end if;
    if v_changes and exists (
        select
        from pg_foreign_server as s
        where s.srvname = v_server and not pg_has_role(s.srvowner, 'usage')
    ) then
        raise exception using errcode = '42501',
            message = 'only the owner of the server may map users to the shards',
            hint    = 'lenso-jobs fleet configure makes the mappings.';
    end if;
end;
$$;
comment on function _shard_mapping_kept() is
'Refuses a change of a user mapping to the shards by anyone but the owner of the '
'foreign server.';
