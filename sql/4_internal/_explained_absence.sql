create or replace function _explained_absence(p_answer explained_job)
returns explained_job
language plpgsql
stable
as $$
begin
    p_answer.reason := 'purged_or_unknown';
    -- The first 48 bits of a job's id are the milliseconds since 1970.
    if substr(p_answer.job_id::text, 15, 1) = '7' then
        p_answer.since := timestamptz 'epoch' + interval '1 millisecond' * (
            'x' || left(replace(p_answer.job_id::text, '-', ''), 12)
        )::bit(48)::bigint;
    end if;
    select (o.arguments ->> 'before')::timestamptz, o.operator::text
    into p_answer.until, p_answer.who
    from operator_act as o
    where
        o.act = 'purge'
        and o.job_count > 0
        and (o.arguments ->> 'before')::timestamptz > p_answer.since
    order by o.operator_act_id desc
    limit 1;
    return p_answer;
end;
$$;
comment on function _explained_absence(explained_job) is
'Adds when a job of this id would have been made, and the last purge it may have '
'fallen to.';
