-- The whole permission model: each group has these rights, and nobody has another.
create or replace function _catalogue_grants()
returns table (role_kind text, object text, privilege text)
language sql immutable as $$
    select r.kind, g.object,
        case split_part(g.object, ' ', 1)
            when 'schema' then 'USAGE' when 'view' then 'SELECT' else 'EXECUTE'
        end
    from (
        values
            ('producer worker observer operator', 'schema'),
            ('producer worker observer operator', 'view error_code'),
            ('producer worker observer operator', 'view explain_reason'),
            ('producer worker observer operator', 'view health_finding'),
            ('producer worker observer operator', 'view installed_version'),

            (
                'producer',
                'function '
                'enqueue(text,text,jsonb,text,timestamp with time zone,integer)'
            ),
            ('producer', 'function enqueue_many(jsonb)'),

            ('worker', 'function claim(text,integer)'),
            ('worker', 'function renew(uuid,text)'),
            ('worker', 'function renew_many(uuid[],text[])'),
            ('worker', 'function complete(uuid,text)'),
            ('worker', 'function complete_many(uuid[],text[])'),
            ('worker', 'function fail(uuid,text,text,boolean,integer)'),
            ('worker', 'function fail_many(uuid[],text[],text[],boolean[],integer[])'),
            ('worker', 'function release(uuid,text,integer)'),
            ('worker', 'function release_many(uuid[],text[],integer[])'),
            ('worker', 'function next_available_at(text)'),
            ('worker', 'function wait_key(text)'),

            ('producer worker observer operator', 'function inspect(uuid)'),

            ('producer observer operator', 'function inspect_key(text,text)'),

            ('observer operator', 'function inspect_attempts(uuid)'),
            ('observer operator', 'function inspect_jobs(text,text,text,integer,uuid)'),
            ('observer operator', 'function inspect_queues()'),
            ('observer operator', 'function inspect_workers()'),
            (
                'observer operator',
                'function inspect_failures(text,timestamp with time zone,integer,text,'
                'timestamp with time zone,uuid,text)'
            ),
            ('observer operator', 'function inspect_acts(integer,bigint)'),
            ('observer operator', 'function inspect_health()'),
            ('observer operator', 'function explain_job(uuid)'),

            ('operator', 'function redrive(uuid,integer)'),
            (
                'operator',
                'function redrive_failed(text,timestamp with time zone,'
                'timestamp with time zone,text,integer,integer,integer,text)'
            ),
            ('operator', 'function purge(timestamp with time zone,integer)'),
            ('operator', 'function enforce_retention(integer)'),
            ('operator', 'function retire_expired(integer)'),
            ('operator', 'function pause(text)'),
            ('operator', 'function resume(text)'),
            ('operator', 'function erase(uuid)')
    ) as g (kinds, object)
    cross join unnest(string_to_array(g.kinds, ' ')) as r (kind)
$$;
comment on function _catalogue_grants() is
'Which group may use which object, and how: all the rights that the Instance gives.';
