create or replace function _health_failures()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    -- So few make no finding, and the ends need not be read.
    if 5 > (
        select count(*)
        from (
            select from attempt as a
            where (a.outcome = 'failed' or a.failure_code = 'attempts_exhausted')
                and a.ended_at > v_now - interval '1 hour'
            limit 5
        ) as f
    ) then
        return;
    end if;

    return query
    -- Of each kind the last 1,000 ends of an hour: a share of so many does not flap.
    with ends as materialized (
        select
            e.*, j.kind::text as kind, row_number() over (
                partition by e.queue, j.kind order by e.ended_at desc
            ) as place
        from _queue_ends(v_now - interval '1 hour', 3000) as e
        -- The job's row is found by its key behind a fence.
        cross join lateral (
            select i.kind from job as i where i.job_id = e.job_id offset 0
        ) as j
        -- A job that was redriven has not failed. EXISTS might hash all live rows.
        where not (
            e.has_failed
            and (
                (select l.job_id from live_job as l where l.job_id = e.job_id)
                is not null
                or exists (
                    select from attempt as a
                    where a.job_id = e.job_id and a.ended_at > e.ended_at
                )
            )
        )
    ),
    judged (finding, queue, subject, since, failed, ended, code) as (
        select 'jobs_failing', e.queue, e.queue, min(e.ended_at),
            count(*) filter (where e.has_failed), count(*),
            mode() within group (order by e.failure_code) filter (where e.has_failed)
        from ends as e
        where e.ended_at > v_now - interval '5 minutes'
        group by e.queue
        having count(*) filter (where e.has_failed) >= greatest(20, count(*) / 2.0)
        union all
        select 'kind_failing', e.queue, format('kind %s of queue %s', e.kind, e.queue),
            min(e.ended_at), count(*) filter (where e.has_failed), count(*),
            mode() within group (order by e.failure_code) filter (where e.has_failed)
        from ends as e
        where e.place <= 1000
        group by e.queue, e.kind
        having
            count(*) >= 20
            and count(*) filter (where e.has_failed) >= greatest(5, count(*) / 10.0)
    )
    select j.finding, j.subject, j.since,
        format(
            'has %s among the last %s, most often %s', _health_counted(j.failed, 'failure'),
            _health_counted(j.ended, 'end'), j.code
        ), null::text
    from judged as j
    where j.finding = 'jobs_failing'
        or j.queue not in (
            select q.queue from judged as q where q.finding = 'jobs_failing'
        );
end;
$$;
comment on function _health_failures() is
'Queues and kinds of which many jobs have failed of late, for inspect_health.';
