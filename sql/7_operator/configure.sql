-- Runs with the rights of whoever calls it, and only the owner may.
create or replace function configure(
    p_document    jsonb,
    p_drop_queues boolean default false
)
returns boolean
language plpgsql
set search_path from current
set lock_timeout = '5s'
as $$
declare
    v_fault   text    := _document_fault(p_document, current_schema());
    v_queues  text[];
    v_held    text;
    v_count   integer;
    v_changes integer := 0;
begin
    if v_fault is not null then
        raise exception using errcode = 'LJ007', message = v_fault;
    end if;
    if p_drop_queues is null then
        raise exception using
            errcode = 'LJ007',
            message = 'whether to drop queues that have live jobs must be said';
    end if;
    -- An older snapshot would not show the jobs of a queue that is left out.
    if current_setting('transaction_isolation') not like 'read %' then
        raise exception using
            errcode = 'LJ007',
            message = 'configure needs a transaction at READ COMMITTED';
    end if;

    lock table instance in share row exclusive mode;
    insert into instance as i (
        lease_seconds, retry_base_seconds, retry_max_seconds,
        retry_jitter, notify, retention_seconds
    )
    values (
        (p_document -> 'lease_seconds')::integer,
        (p_document -> 'retry_base_seconds')::integer,
        (p_document -> 'retry_max_seconds')::integer,
        coalesce((p_document ->> 'retry_jitter')::double precision, 0),
        coalesce((p_document ->> 'notify')::boolean, true),
        (p_document ->> 'retention_seconds')::bigint
    )
    on conflict (is_only) do update
    set
        lease_seconds = excluded.lease_seconds,
        retry_base_seconds = excluded.retry_base_seconds,
        retry_max_seconds = excluded.retry_max_seconds,
        retry_jitter = excluded.retry_jitter,
        notify = excluded.notify,
        retention_seconds = excluded.retention_seconds,
        configured_at = excluded.configured_at
    where
        (
            i.lease_seconds, i.retry_base_seconds, i.retry_max_seconds,
            i.retry_jitter, i.notify, i.retention_seconds
        )
        is distinct from (
            excluded.lease_seconds, excluded.retry_base_seconds,
            excluded.retry_max_seconds, excluded.retry_jitter, excluded.notify,
            excluded.retention_seconds
        );
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    v_queues := array(
        select q.value from jsonb_array_elements_text(p_document -> 'queues') as q
    );
    insert into queue (queue)
    select q.queue from unnest(v_queues) as q (queue)
    on conflict (queue) do nothing;
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    if exists (select from queue as q where q.queue <> all (v_queues)) then
        -- Whoever enqueues has read the instance's row and so holds the table until its
        -- transaction ends: behind this lock every job of the queue can be seen, but
        -- for those that a transaction with an older snapshot may still add. Every verb
        -- waits behind whoever waits for it, hence the timeout above.
        if not p_drop_queues then
            lock table instance in access exclusive mode;
            -- Counted so far and no further: everybody waits.
            select string_agg(format(
                '%s (%s)', q.queue,
                case when h.jobs > 10000 then 'more than 10000' else h.jobs::text end
            ), ', ' order by q.queue)
            into v_held
            from queue as q
            cross join lateral (
                select count(*) as jobs
                from (
                    select from live_job as l where l.queue = q.queue limit 10001
                ) as l
            ) as h
            where q.queue <> all (v_queues) and h.jobs > 0;
            if v_held is not null then
                raise exception using
                    errcode = 'LJ007',
                    message = format(
                        'queues that the document leaves out still have live jobs: %s',
                        v_held
                    ),
                    hint    = 'Declare them until their jobs have ended. Or drop them '
                              'all the same, lenso-jobs configure --drop-queues: the '
                              'jobs wait until their queue is declared again.';
            end if;
        end if;
        delete from queue as q where q.queue <> all (v_queues);
        v_changes := v_changes + 1;
    end if;

    delete from caller as c
    where c.caller not in (select d.caller from _callers_of(p_document) as d);
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    insert into caller as c (caller, is_producer, is_worker, is_observer)
    select d.caller, d.is_producer, d.is_worker, d.is_observer
    from _callers_of(p_document) as d
    on conflict (caller) do update
    set
        is_producer = excluded.is_producer,
        is_worker = excluded.is_worker,
        is_observer = excluded.is_observer
    where
        (c.is_producer, c.is_worker, c.is_observer)
        is distinct from
        (excluded.is_producer, excluded.is_worker, excluded.is_observer);
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    if v_changes > 0 then
        insert into operator_act (operator, act, arguments, job_count)
        values (_caller(), 'configure', p_document, 0);
    end if;
    return v_changes > 0;
exception when check_violation or numeric_value_out_of_range then
    raise exception using
        errcode = 'LJ007',
        message = format('a value of the document is out of range: %s', sqlerrm);
end;
$$;
comment on function configure(jsonb, boolean) is
'Stores policy, queues and callers as the configuration document has them, and answers '
'whether anything changed; audited. For the owner alone; memberships are '
'bootstrap.sql''s. Refuses unknown fields, another schema''s document, and to leave '
'out a queue that has live jobs (LJ007), unless the second argument says to drop it: '
'the jobs stay, and wait until the queue is declared again.';
