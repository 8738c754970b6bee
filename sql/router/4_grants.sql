-- Drops the functions that this transaction did not make: another release made them.
do $$
declare
    v_trigger text := current_schema() || '_shards';
    v_event   text;
    v_tags    text;
    v_stray   text;
begin
    for v_stray in
        select p.oid::regprocedure::text
        from pg_proc as p
        where p.pronamespace = current_schema()::regnamespace
            and p.xmin <> pg_current_xact_id()::xid
    loop
        execute format('drop function %s', v_stray);
    end loop;

    for v_trigger, v_event, v_tags in
        values
            (v_trigger, 'ddl_command_end', '''CREATE USER MAPPING'', ''ALTER USER MAPPING'''),
            (v_trigger || '_drop', 'sql_drop', '''DROP USER MAPPING'', ''DROP OWNED''')
    loop
        if not exists (
            select from pg_event_trigger as e where e.evtname = v_trigger
        ) then
            execute format(
                'create event trigger %I on %s when tag in (%s) '
                'execute function _shard_mapping_kept()', v_trigger, v_event, v_tags
            );
        end if;
        -- A disabled one would let a caller map itself to another role.
        execute format('alter event trigger %I enable', v_trigger);
    end loop;
end $$;

-- Takes every right on the router's objects from everybody but their owner, then gives
-- what _catalogue_grants lists, and what the functions behind those need.
do $$
declare
    v_schema text := current_schema();
    v_prefix text := (
        select left(pg_get_userbyid(n.nspowner), -5)
        from pg_namespace as n
        where n.nspname = v_schema
    );
    v_change text;
begin
    for v_change in
        select format(
            'revoke all on %s from %s cascade', o.place,
            case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
        )
        from (
            select format('function %s', p.oid::regprocedure), p.proowner,
                coalesce(p.proacl, acldefault('f', p.proowner))
            from pg_proc as p
            where p.pronamespace = v_schema::regnamespace
            union all
            select format('table %s', c.oid::regclass), c.relowner, c.relacl
            from pg_class as c
            where c.relnamespace = v_schema::regnamespace and c.relkind = 'v'
            union all
            select format('schema %I', n.nspname), n.nspowner, n.nspacl
            from pg_namespace as n
            where n.nspname = v_schema
            union all
            select format('foreign server %I', s.srvname), s.srvowner, s.srvacl
            from pg_foreign_server as s
            where s.srvname = v_schema || '_shards'
        ) as o (place, owner, acl)
        cross join aclexplode(o.acl) as a
        where a.grantee <> o.owner
    loop
        execute v_change;
    end loop;

    for v_change in
        select format('grant %s on %s to %I', g.privilege, g.place, v_prefix || g.role_kind)
        from (
            select c.role_kind, c.privilege,
                case split_part(c.object, ' ', 1)
                    when 'schema' then format('schema %I', v_schema)
                    when 'view' then split_part(c.object, ' ', 2)
                    else c.object
                end as place
            from _catalogue_grants() as c
            union all
            select c.role_kind, 'EXECUTE', format('function %s', p.oid::regprocedure)
            from _catalogue_grants() as c
            join pg_proc as p
                on p.pronamespace = v_schema::regnamespace
                and p.proname = '_shard_' || substring(c.object from '^function (\w+)')
            union all
            select r.kind, 'EXECUTE', format('function %s', p.oid::regprocedure)
            from unnest(array['producer', 'worker', 'observer', 'operator']) as r (kind)
            join pg_proc as p
                on p.pronamespace = v_schema::regnamespace
                and p.proname in ('_shards', '_shard_of', '_shard_refused', '_shard_server')
            union all
            select r.kind, 'USAGE', format('foreign server %I', v_schema || '_shards')
            from unnest(array['producer', 'worker', 'observer', 'operator']) as r (kind)
        ) as g
    loop
        execute v_change;
    end loop;
end $$;
