create or replace function _health_history()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
declare
    v_newest timestamptz := greatest(
        (select j.created_at::timestamptz from job as j order by j.job_id desc limit 1),
        (select e.ended_at from _queue_ends('-infinity', 1) as e)
    );
    v_oldest timestamptz := (
        select a.ended_at::timestamptz
        from attempt as a
        where a.outcome in ('succeeded', 'failed')
            or a.failure_code = 'attempts_exhausted'
        order by a.ended_at
        limit 1
    );
    v_keep   interval := (
        select make_interval(secs => i.retention_seconds) from instance as i
    );
begin
    if not exists (select from instance) then
        return query select
            'not_configured', 'instance', null::timestamptz,
            'holds no configuration', 'lenso-jobs configure';
    end if;
    if not _policy_is_published() then
        return query select
            'not_configured', 'the row of instance', null::timestamptz,
            'does not repeat the tables queue and caller',
            format('update %I.queue set queue = queue', current_schema());
    end if;
    -- The clock of a server that took over may be a little behind.
    if v_newest > clock_timestamp() + interval '1 second' then
        return query select
            'clock_went_back', 'the server''s clock', v_newest,
            'is behind what is on record by ' || (v_newest - clock_timestamp()),
            null::text;
    end if;
    if v_oldest < clock_timestamp() - v_keep * 1.1 - interval '1 hour' then
        return query select
            'retention_overdue', 'the oldest evidence', v_oldest,
            'is to be kept for ' || v_keep, 'lenso-jobs purge --retention --yes';
    end if;

    -- Logical replication and a dump of the rows alone leave the sequence behind. Looked
    -- for in the Instance's schema alone: the caller's own temporary relations come
    -- after it.
    if to_regclass(
        format('%I.operator_act_operator_act_id_seq', current_schema())
    ) is not null then
        return query
        select 'sequence_behind', 'sequence operator_act_operator_act_id_seq',
            null::timestamptz, 'gives a number that is taken: every operator act fails',
            format(
                'select setval(%L, %s)',
                current_schema() || '.operator_act_operator_act_id_seq', a.newest
            )
        from operator_act_operator_act_id_seq as s
        cross join (select max(o.operator_act_id) from operator_act as o) as a (newest)
        where a.newest > case when s.is_called then s.last_value else 0 end;
    end if;

    -- The tables of the migration tool, if that was used.
    if to_regclass(format('%I.yoyo_lock', current_schema())) is not null then
        return query
        select 'migration_unfinished', 'yoyo_lock', y.ctime::timestamptz,
            'was taken by process ' || y.pid, null::text
        from yoyo_lock as y;
    end if;
    if to_regclass(format('%I._yoyo_migration', current_schema())) is not null then
        return query
        select 'migration_unfinished', 'installed_version', null::timestamptz,
            format('is %s, and the last migration on record is %s', v.version, m.version),
            'lenso-jobs upgrade'
        from installed_version as v
        cross join (
            select max(substring(y.migration_id from '^[0-9]+')::integer)
            from _yoyo_migration as y
        ) as m (version)
        where v.version <> m.version;
    end if;
end;
$$;
comment on function _health_history() is
'Configuration, clock, retention and migrations, for inspect_health.';
