-- Runs with the rights of its caller, and only the owner may.
create or replace function configure(
    p_document jsonb, p_drop_queues boolean default false
)
returns boolean
language plpgsql
set search_path from current
set lock_timeout = '5s'
as $$
declare
    v_fault   text   := _document_fault(p_document, current_schema());
    v_queues  text[];
    v_before  jsonb;
    v_changes jsonb;
begin
    if v_fault is not null then
        raise exception using errcode = 'LJ007', message = v_fault;
    end if;
    if p_drop_queues is null then
        raise exception using errcode = 'LJ007',
            message = 'whether to drop queues that have live jobs must be said';
    end if;
    -- An older snapshot would not show the jobs of a queue that is left out.
    if current_setting('transaction_isolation') not like 'read %' then
        raise exception using errcode = 'LJ007',
            message = 'configure needs a transaction at READ COMMITTED';
    end if;

    lock table instance in share row exclusive mode;
    v_before := _document_stored();
    insert into instance (
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
        configured_at = excluded.configured_at;

    v_queues := array(
        select q.value from jsonb_array_elements_text(p_document -> 'queues') as q
    );
    if not p_drop_queues then
        perform _require_no_jobs_outside(v_queues);
    end if;
    delete from queue as q where q.queue <> all (v_queues);
    insert into queue (queue)
    select q.queue from unnest(v_queues) as q (queue)
    on conflict (queue) do nothing;
    perform _claim_floors_made();

    with declared as (
        select n.name as caller,
            bool_or(k.field = 'producer_instances') as is_producer,
            bool_or(k.field = 'worker_instances') as is_worker,
            bool_or(k.field = 'observer_instances') as is_observer
        from unnest(array[
            'producer_instances', 'worker_instances', 'observer_instances'
        ]) as k (field)
        cross join lateral jsonb_array_elements_text(p_document -> k.field) as n (name)
        group by n.name
    ),
    gone as (
        delete from caller as c
        where c.caller not in (select d.caller from declared as d)
    )
    insert into caller as c (caller, is_producer, is_worker, is_observer)
    select d.caller, d.is_producer, d.is_worker, d.is_observer from declared as d
    on conflict (caller) do update
    set
        is_producer = excluded.is_producer,
        is_worker = excluded.is_worker,
        is_observer = excluded.is_observer;

    -- The audit shows observers what changed, and never where the database's URL is kept.
    select jsonb_object_agg(
        n.field, jsonb_build_object('from', v_before -> n.field, 'to', n.value)
    )
    into v_changes
    from jsonb_each(_document_stored()) as n (field, value)
    where n.value is distinct from v_before -> n.field;
    if v_changes is not null then
        insert into operator_act (operator, act, arguments, job_count)
        values (_caller(), 'configure', v_changes, 0);
    end if;
    return v_changes is not null;
exception when check_violation or numeric_value_out_of_range then
    raise exception using errcode = 'LJ007',
        message = format('a value of the document is out of range: %s', sqlerrm);
end;
$$;
comment on function configure(jsonb, boolean) is
'Stores policy, queues and callers as the configuration document has them, and returns '
'whether anything changed; audited. For the owner alone; memberships are '
'bootstrap.sql''s. Refuses unknown fields, another schema''s document, and to leave '
'out a queue that has live jobs (LJ007), unless the second argument says to drop it: '
'the jobs stay, and wait until the queue is declared again.';
