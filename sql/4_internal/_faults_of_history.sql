create or replace function _faults_of_history()
returns table (finding text, subject text, since timestamptz, detail text)
language plpgsql
stable
as $$
declare
    v_newest timestamptz := greatest(
        (select j.created_at::timestamptz from job as j order by j.job_id desc limit 1),
        (
            select a.ended_at::timestamptz
            from attempt as a
            where
                a.outcome in ('succeeded', 'failed')
                or a.failure_code = 'attempts_exhausted'
            order by a.ended_at desc
            limit 1
        )
    );
    v_oldest timestamptz := (
        select a.ended_at::timestamptz
        from attempt as a
        where
            a.outcome in ('succeeded', 'failed')
            or a.failure_code = 'attempts_exhausted'
        order by a.ended_at
        limit 1
    );
    v_keep   interval := (
        select make_interval(secs => i.retention_seconds) from instance as i
    );
begin
    if not exists (select from instance) then
        return query select 'not_configured', 'instance', null::timestamptz, null::text;
    end if;
    -- The clock of a server that took over may be a little behind.
    if v_newest > clock_timestamp() + interval '1 second' then
        return query select
            'clock_went_back', 'the server''s clock', v_newest,
            'behind what is on record by ' || (v_newest - clock_timestamp());
    end if;
    if v_oldest < clock_timestamp() - v_keep * 1.1 - interval '1 hour' then
        return query select
            'retention_overdue', 'the oldest evidence', v_oldest,
            'is to be kept for ' || v_keep;
    end if;

    -- Logical replication and a dump of the rows alone leave the sequence behind.
    if to_regclass(
        format('%I.operator_act_operator_act_id_seq', current_schema())
    ) is not null then
        return query
        select
            'object_changed', 'sequence operator_act_operator_act_id_seq',
            null::timestamptz, 'its next number is taken: every operator act fails'
        from operator_act_operator_act_id_seq as s
        where
            (select max(o.operator_act_id) from operator_act as o)
            > case when s.is_called then s.last_value else 0 end;
    end if;

    -- Where the migration tool keeps its books, if that is what was used. Looked for in
    -- the Instance's schema alone: the caller's own temporary relations come after it.
    if to_regclass(format('%I.yoyo_lock', current_schema())) is not null then
        return query
        select
            'migration_unfinished', 'yoyo_lock', y.ctime::timestamptz,
            'taken by process ' || y.pid
        from yoyo_lock as y;
    end if;
    if to_regclass(format('%I._yoyo_migration', current_schema())) is not null then
        return query
        select
            'migration_unfinished', 'installed_version', null::timestamptz,
            format('the schema is at %s, its books say %s', v.version, m.version)
        from installed_version as v
        cross join (
            select max(substring(y.migration_id from '^[0-9]+')::integer)
            from _yoyo_migration as y
        ) as m (version)
        where v.version <> m.version;
    end if;
end;
$$;
comment on function _faults_of_history() is
'Configuration, clock, retention and migrations, for inspect_health.';
