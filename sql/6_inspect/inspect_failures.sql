create or replace function inspect_failures(
    p_queue text default null,
    p_since timestamptz default null,
    p_limit integer default 100,
    p_failure_code text default null,
    p_before timestamptz default null,
    p_before_job_id uuid default null
)
returns setof inspected_failure
language plpgsql
stable
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
set enable_sort = off
as $$
begin
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using
            errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;
    if p_queue is not null then
        perform _require_queue(p_queue);
    end if;

    return query
    select
        j.job_id, j.queue::text, j.kind::text, a.failure_code::text, a.worker::text,
        a.attempt, a.ended_at::timestamptz
    from (
        select e.*
        from attempt as e
        where
            (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
            and e.ended_at >= coalesce(p_since, '-infinity')
            and (e.ended_at, e.job_id) < (
                coalesce(p_before, 'infinity'),
                coalesce(
                    p_before_job_id, uuid '00000000-0000-0000-0000-000000000000'
                )
            )
            and (
                p_failure_code is null
                or e.failure_code = p_failure_code collate "C"
            )
        order by e.ended_at desc, e.job_id desc
    ) as a
    cross join lateral (
        select i.*
        from job as i
        where
            i.job_id = a.job_id
            and (p_queue is null or i.queue = p_queue collate "C")
            and (select l.job_id from live_job as l where l.job_id = a.job_id) is null
            and a.attempt = (
                select max(n.attempt) from attempt as n where n.job_id = a.job_id
            )
        offset 0
    ) as j
    order by a.ended_at desc, a.job_id desc
    limit p_limit;
end;
$$;
comment on function
inspect_failures(text, timestamptz, integer, text, timestamptz, uuid) is
'The jobs that have failed and were not redriven, newest first: of one queue or all '
'(NULL), since a time or ever (NULL), with one failure code or any (NULL). The next '
'page is asked for with ended_at and job_id of the last row. Refuses a queue that is '
'not declared (LJ003), a malformed failure code (LJ005), other than 1 to 10000 rows '
'(LJ007).';
