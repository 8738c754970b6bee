create or replace function purge(p_before timestamptz, p_limit integer default 1000)
returns integer
language plpgsql security definer
set search_path from current as $$
declare
    v_job_ids uuid[];
    v_count   integer;
begin
    if (isfinite(p_before) and p_before <= clock_timestamp()) is not true then
        raise exception using errcode = 'LJ007',
            message = 'before must be a finite time that has passed';
    end if;
    perform _require_range('limit', p_limit, 1, 10000);

    -- Lookups are fenced or scalar: as joins, planned while the tables were empty, they
    -- would be walks.
    v_job_ids := array(
        select j.job_id
        from (
            select e.job_id, e.attempt
            from attempt as e
            where e.ended_at < p_before
                and (
                    e.outcome in ('succeeded', 'failed')
                    or e.failure_code = 'attempts_exhausted'
                )
            order by e.ended_at
        ) as a
        cross join lateral (
            select i.job_id
            from job as i
            where i.job_id = a.job_id
                and a.attempt = (
                    select max(n.attempt) from attempt as n where n.job_id = a.job_id
                )
                and (select l.job_id from live_job as l where l.job_id = a.job_id)
                is null
            offset 0
            for update skip locked
        ) as j
        limit p_limit
    );

    -- Between the look and the lock a job may have been redriven, and even have ended
    -- anew: a statement of its own sees that.
    with gone as (
        delete from job as j
        where j.job_id = any (v_job_ids)
            and (select l.job_id from live_job as l where l.job_id = j.job_id) is null
            and p_before > (
                select max(a.ended_at) from attempt as a where a.job_id = j.job_id
            )
        returning j.job_id
    )
    select array_agg(g.job_id), count(*)::integer into v_job_ids, v_count
    from gone as g;
    delete from attempt as a where a.job_id = any (v_job_ids);

    if v_count > 0 then
        insert into operator_act (operator, act, arguments, job_count)
        values (
            _caller(), 'purge',
            jsonb_build_object('before', p_before, 'limit', p_limit), v_count
        );
    end if;
    return v_count;
end;
$$;
comment on function purge(timestamptz, integer) is
'Deletes up to p_limit jobs that ended before the given time, oldest end first, with '
'their evidence and keys, and returns how many; audited. Call it until it returns 0. '
'Refuses a cut-off that is NULL, infinite or yet to come, and other than 1 to 10000 '
'jobs (LJ007).';
