create or replace function inspect_jobs(
    p_queue text, p_status text, p_kind text default null,
    p_limit integer default 100, p_before uuid default null
)
returns setof inspected_job
language plpgsql stable security definer
set search_path from current as $$
declare
    v_before  uuid := coalesce(p_before, uuid 'ffffffff-ffff-ffff-ffff-ffffffffffff');
    v_job_ids uuid[];
    v_count   integer;
    v_mark    inspected_job;
begin
    perform _require_tables();
    perform _require_queue(p_queue);
    if
        (
            p_status collate "C"
            = any (array['queued', 'running', 'succeeded', 'failed', 'lost'])
        ) is not true
    then
        raise exception using errcode = 'LJ007',
            message = 'status must be queued, running, succeeded, failed or lost';
    end if;
    perform _require_kind(p_kind);
    perform _require_range('limit', p_limit, 1, 10000);

    -- Live jobs are few among all jobs.
    if p_status collate "C" = any (array['queued', 'running']) then
        v_job_ids := array(
            select l.job_id
            from live_job as l
            where l.job_id < v_before
            order by l.job_id desc
            limit 10000
        );
    else
        v_job_ids := array(
            select j.job_id
            from job as j
            where j.job_id < v_before
            order by j.job_id desc
            limit 10000
        );
    end if;

    -- Behind the fence each job is found by its key, in the order of the ids. A join,
    -- planned while the tables were empty, would read all jobs for each id.
    return query
    select f.*
    from (
        select r.*
        from unnest(v_job_ids) as u (job_id)
        cross join lateral (
            select i.* from _inspect_row(u.job_id) as i offset 0
        ) as r
        where r.queue = p_queue collate "C"
            and r.status = p_status collate "C"
            and (p_kind is null or r.kind = p_kind collate "C")
        limit p_limit
    ) as f
    order by f.job_id desc;
    get diagnostics v_count = row_count;
    if v_count < p_limit and cardinality(v_job_ids) = 10000 then
        v_mark.job_id := v_job_ids[10000];
        return next v_mark;
    end if;
end;
$$;
comment on function inspect_jobs(text, text, text, integer, uuid) is
'The jobs of a queue that are queued, running, succeeded, failed or lost, newest '
'first, of one kind or any (NULL). A call looks at 10000 jobs of all queues at most; '
'if more are left, a last row has nothing but a job_id. The next page is asked for '
'with job_id of the last row. Refuses a queue that is not declared (LJ003), another '
'status, a malformed kind, and other than 1 to 10000 rows (LJ007).';
