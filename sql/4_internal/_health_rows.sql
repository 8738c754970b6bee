-- Rows are written and deleted together by the functions. Where they disagree somebody
-- changed them by hand, or put a table in the place of another. Lost jobs are new at
-- first; purge, which goes by attempts, leaves them behind as the oldest.
create or replace function _health_rows()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with kept as (
        (select j.job_id from job as j order by j.job_id limit 500)
        union
        (select j.job_id from job as j order by j.job_id desc limit 2000)
    ),
    live as (
        (select l.job_id from live_job as l order by l.job_id limit 500)
        union
        (select l.job_id from live_job as l order by l.job_id desc limit 2000)
    )
    select 'job_lost', 'job ' || min(k.job_id::text), null::timestamptz,
        concat(
            'and at least ' || _health_counted(nullif(count(*) - 1, 0), 'other') || ' ',
            case count(*) when 1 then 'is' else 'are' end, ' neither live nor ended'
        ), 'lenso-jobs explain ' || min(k.job_id::text)
    from kept as k
    left join lateral (
        select a.outcome, a.failure_code
        from attempt as a
        where a.job_id = k.job_id
        order by a.attempt desc
        limit 1
    ) as a on true
    where _status(false, false, a.outcome, a.failure_code) = 'lost'
        and not exists (select from live_job as l where l.job_id = k.job_id)
    having count(*) > 0
    union all
    select 'live_row_stray', 'live row ' || min(v.job_id::text), null,
        concat(
            'and at least ' || _health_counted(nullif(count(*) - 1, 0), 'other') || ' ',
            case count(*) when 1 then 'has' else 'have' end, ' no job'
        ),
        format(
            'restore the rows of job from a backup; or, and it deletes data: delete from '
            '%1$I.live_job as l where not exists (select from %1$I.job as j where '
            'j.job_id = l.job_id)', current_schema()
        )
    from live as v
    where not exists (select from job as j where j.job_id = v.job_id)
    having count(*) > 0
$$;
comment on function _health_rows() is
'Jobs that were lost and live rows without a job, among the 2,000 newest and the 500 '
'oldest rows, for inspect_health.';
