create or replace function inspect_failures(
    p_queue text default null, p_since timestamptz default null,
    p_limit integer default 100, p_failure_code text default null,
    p_before timestamptz default null, p_before_job_id uuid default null,
    p_kind text default null
)
returns setof inspected_failure
language plpgsql stable security definer
set search_path from current as $$
declare
    v_since         timestamptz := coalesce(p_since, timestamptz '-infinity');
    v_before        timestamptz := coalesce(p_before, timestamptz 'infinity');
    v_before_job_id uuid
    := coalesce(p_before_job_id, uuid '00000000-0000-0000-0000-000000000000');
begin
    perform _require_tables();
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    perform _require_range('limit', p_limit, 1, 10000);
    perform _require_kind(p_kind);
    if p_queue is not null then
        perform _require_queue(p_queue);
    end if;

    -- Two searches, each in the order of its own index, of which one finds nothing: a
    -- condition on the queue that may be NULL would use neither.
    return query
    select f.*
    from (
        select j.job_id, j.queue::text, j.kind::text, a.failure_code::text,
            a.worker::text, a.attempt, a.ended_at::timestamptz
        from (
            (
                select e.*
                from attempt as e
                where p_queue is null
                    and (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
                    and e.ended_at >= v_since
                    and (e.ended_at, e.job_id) < (v_before, v_before_job_id)
                order by e.ended_at desc, e.job_id desc
            )
            union all
            (
                select e.*
                from attempt as e
                where e.queue = p_queue collate "C"
                    and (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
                    and e.ended_at >= v_since
                    and (e.ended_at, e.job_id) < (v_before, v_before_job_id)
                order by e.ended_at desc, e.job_id desc
            )
        ) as a
        cross join lateral (
            select i.*
            from job as i
            where i.job_id = a.job_id
                and (select l.job_id from live_job as l where l.job_id = a.job_id)
                is null
                and a.attempt = (
                    select max(n.attempt) from attempt as n where n.job_id = a.job_id
                )
            offset 0
        ) as j
        where (p_failure_code is null or a.failure_code = p_failure_code collate "C")
            and (p_kind is null or j.kind = p_kind collate "C")
        limit p_limit
    ) as f
    order by f.ended_at desc, f.job_id desc;
end;
$$;
comment on function
inspect_failures(text, timestamptz, integer, text, timestamptz, uuid, text) is
'The jobs that have failed and were not redriven, newest first: of one queue or all '
'(NULL), since a time or ever (NULL), with one failure code or any (NULL), of one kind '
'or any (NULL). The next page is asked for with ended_at and job_id of the last row. '
'Refuses a queue that is not declared (LJ003), a malformed failure code (LJ005), a '
'malformed kind, and other than 1 to 10000 rows (LJ007).';
