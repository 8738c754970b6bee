-- The whole permission model. Everything the owner has here is taken from PUBLIC and
-- from the Instance's groups, then given out by this one list; what somebody granted to
-- another role stands, and check reports it. The roles are found through the schema's
-- owner, so that no file names an Instance.
do $$
declare
    v_schema text := current_schema();
    v_prefix text := (
        select left(pg_get_userbyid(n.nspowner), -6)
        from pg_namespace as n
        where n.nspname = v_schema
    );
    v_groups text;
    v_object record;
begin
    select string_agg(format('%I', v_prefix || '_' || g.kind), ', ')
    into v_groups
    from unnest(array['producer', 'worker', 'observer', 'operator']) as g (kind);

    execute format('revoke all on schema %I from public, %s', v_schema, v_groups);
    for v_object in
        select
            case c.relkind when 'S' then 'sequence' else 'table' end as kind,
            format('%I.%I', v_schema, c.relname) as name
        from pg_class as c
        where
            c.relnamespace = v_schema::regnamespace
            and c.relkind in ('r', 'v', 'S')
            and c.relowner = current_role::regrole
        union all
        -- Row types of tables too; an array follows its element.
        select 'type', format('%I.%I', v_schema, t.typname)
        from pg_type as t
        where
            t.typnamespace = v_schema::regnamespace
            and t.typtype in ('c', 'd')
            and t.typowner = current_role::regrole
        union all
        select 'routine', p.oid::regprocedure::text
        from pg_proc as p
        where p.pronamespace = v_schema::regnamespace
    loop
        execute format(
            'revoke all on %s %s from public, %s',
            v_object.kind, v_object.name, v_groups
        );
    end loop;

    execute format('grant usage on schema %I to %s', v_schema, v_groups);
    execute format(
        'grant select on error_code, explain_reason, health_finding, installed_version '
        'to %s',
        v_groups
    );
    for v_object in
        select g.name, format('%I', v_prefix || '_' || r.kind) as role
        from (
            values
                ('producer', 'enqueue(text, text, jsonb, text, timestamptz, integer)'),
                ('producer', 'enqueue_many(jsonb)'),

                ('worker', 'claim(text, integer)'),
                ('worker', 'renew(uuid, text)'),
                ('worker', 'renew_many(uuid[], text[])'),
                ('worker', 'complete(uuid, text)'),
                ('worker', 'complete_many(uuid[], text[])'),
                ('worker', 'fail(uuid, text, text, boolean)'),
                ('worker', 'fail_many(uuid[], text[], text[], boolean[])'),
                ('worker', 'next_available_at(text)'),
                ('worker', 'wait_key(text)'),

                ('producer worker observer operator', 'inspect(uuid)'),

                ('observer operator', 'inspect_attempts(uuid)'),
                ('observer operator', 'inspect_queues()'),
                ('observer operator', 'inspect_workers()'),
                (
                    'observer operator',
                    'inspect_failures('
                    'text, timestamptz, integer, text, timestamptz, uuid)'
                ),
                ('observer operator', 'inspect_acts(integer, bigint)'),
                ('observer operator', 'inspect_health()'),
                ('observer operator', 'explain_job(uuid)'),

                ('operator', 'redrive(uuid, integer)'),
                (
                    'operator',
                    'redrive_failed('
                    'text, timestamptz, timestamptz, text, integer, integer)'
                ),
                ('operator', 'purge(timestamptz, integer)'),
                ('operator', 'enforce_retention(integer)'),
                ('operator', 'retire_expired(integer)')
        ) as g (kinds, name)
        cross join unnest(string_to_array(g.kinds, ' ')) as r (kind)
    loop
        execute format(
            'grant execute on function %s to %s', v_object.name, v_object.role
        );
    end loop;
end $$;
