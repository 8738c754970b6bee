create or replace function _require_no_jobs_outside(p_queues text[])
returns void
language plpgsql volatile as $$
declare
    v_held text;
begin
    if not exists (select from queue as q where q.queue <> all (p_queues)) then
        return;
    end if;
    -- A session that enqueues has read the row of instance, and holds the table until
    -- its transaction ends: behind this lock every job of the queue can be seen, but
    -- for those that a transaction with an older snapshot may still add. Every verb
    -- waits behind the lock. So the configuration sets a lock timeout, and the jobs are
    -- counted so far and no further.
    lock table instance in access exclusive mode;
    select string_agg(
        format(
            '%s (%s)', q.queue,
            case when h.jobs > 10000 then 'more than 10000' else h.jobs::text end
        ),
        ', ' order by q.queue
    )
    into v_held
    from queue as q
    cross join lateral (
        select count(*) as jobs
        from (select from live_job as l where l.queue = q.queue limit 10001) as l
    ) as h
    where q.queue <> all (p_queues) and h.jobs > 0;
    if v_held is not null then
        raise exception using errcode = 'LJ007',
            message = format(
                'queues that the document leaves out still have live jobs: %s', v_held
            ),
            hint    = 'Declare them until their jobs have ended. Or drop them all the '
                      'same, lenso-jobs configure --drop-queues: the jobs wait until '
                      'their queue is declared again.';
    end if;
end;
$$;
comment on function _require_no_jobs_outside(text[]) is
'Refuses to leave a declared queue out that has live jobs (LJ007).';
