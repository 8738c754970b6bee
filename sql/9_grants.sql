-- The whole permission model. Everything the owner has here is taken from everybody
-- else, then given out by this one list. The roles are found through the schema's
-- owner, so that no file names an Instance.
do $$
declare
    v_schema text := current_schema();
    v_prefix text := (
        select left(pg_get_userbyid(n.nspowner), -6)
        from pg_namespace as n
        where n.nspname = v_schema
    );
    v_others text;
    v_object record;
begin
    select string_agg(format('%I', v_prefix || '_' || g.kind), ', ')
    into v_others
    from unnest(array['producer', 'worker', 'observer', 'operator']) as g (kind);
    v_others := 'public, ' || v_others;

    execute format('revoke all on schema %I from %s', v_schema, v_others);
    for v_object in
        select
            case
                when c.relkind in ('r', 'v') then 'table'
                when c.relkind = 'S' then 'sequence'
                else 'type'
            end as kind,
            format('%I.%I', v_schema, c.relname) as name
        from pg_class as c
        where
            c.relnamespace = v_schema::regnamespace
            and c.relkind in ('r', 'v', 'S', 'c')
            and c.relowner = current_role::regrole
        union all
        select 'domain', format('%I.%I', v_schema, t.typname)
        from pg_type as t
        where t.typnamespace = v_schema::regnamespace and t.typtype = 'd'
        union all
        select 'routine', p.oid::regprocedure::text
        from pg_proc as p
        where p.pronamespace = v_schema::regnamespace
    loop
        execute format(
            'revoke all on %s %s from %s', v_object.kind, v_object.name, v_others
        );
    end loop;

    for v_object in
        select g.what, format('%I', v_prefix || '_' || r.kind) as role
        from (
            values
                ('producer worker observer operator', 'usage on schema '),
                ('producer worker observer operator', 'select on table error_code'),
                ('producer worker observer operator', 'select on table installed_version'),

                ('producer', 'execute on function enqueue(text, text, jsonb, text, timestamptz, integer)'),
                ('producer', 'execute on function enqueue_many(jsonb)'),

                ('worker', 'execute on function claim(text, integer)'),
                ('worker', 'execute on function renew(uuid, text)'),
                ('worker', 'execute on function renew_many(uuid[], text[])'),
                ('worker', 'execute on function complete(uuid, text)'),
                ('worker', 'execute on function complete_many(uuid[], text[])'),
                ('worker', 'execute on function fail(uuid, text, text, boolean)'),
                ('worker', 'execute on function fail_many(uuid[], text[], text[], boolean[])'),
                ('worker', 'execute on function next_available_at(text)'),

                ('producer worker observer operator', 'execute on function inspect(uuid)'),

                ('operator', 'execute on function redrive(uuid, integer)'),
                ('operator', 'execute on function purge(timestamptz, integer)'),
                ('operator', 'execute on function retire_expired(integer)')
        ) as g (kinds, what)
        cross join unnest(string_to_array(g.kinds, ' ')) as r (kind)
    loop
        execute format(
            'grant %s to %s',
            case when v_object.what = 'usage on schema '
                then v_object.what || format('%I', v_schema)
                else v_object.what
            end,
            v_object.role
        );
    end loop;
end $$;
