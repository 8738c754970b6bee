create or replace function fail_many(
    p_job_ids uuid[],
    p_lease_tokens text[],
    p_failure_codes text[],
    p_retryable boolean[]
)
returns setof failed_item
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_tidscan = on
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
as $$
declare
    v_caller    text collate "C" := _caller();
    v_rows      tid[];
    v_job_ids   uuid[];
    v_codes     text[];
    v_retryable boolean[];
    v_queues    text[];
begin
    if not _is_batch(
        array[
            array_ndims(p_job_ids), array_ndims(p_lease_tokens),
            array_ndims(p_failure_codes), array_ndims(p_retryable)
        ],
        array[
            cardinality(p_job_ids), cardinality(p_lease_tokens),
            cardinality(p_failure_codes), cardinality(p_retryable)
        ]
    ) then
        raise exception using
            errcode = 'LJ007',
            message = 'job_ids, lease_tokens, failure_codes and retryable must be '
                      'parallel lists of 1 to 1000 items';
    end if;

    -- Locked and judged as in complete_many; of an item given twice the first counts.
    select
        array_agg(m.ctid), array_agg(m.job_id),
        array_agg(m.failure_code), array_agg(m.retryable)
    into v_rows, v_job_ids, v_codes, v_retryable
    from (
        select distinct on (i.job_id) l.ctid, i.*
        from (
            select u.*
            from unnest(p_job_ids, p_lease_tokens, p_failure_codes, p_retryable)
            with ordinality as u (job_id, lease_token, failure_code, retryable)
            where _is_name(u.failure_code, 128) and u.retryable is not null
            order by u.job_id, u.ordinality
        ) as i
        cross join lateral (
            select l.ctid
            from live_job as l
            where
                l.job_id = i.job_id
                and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
                and l.lease_owner = v_caller
            for update
        ) as l
        order by i.job_id, i.ordinality
    ) as m;

    -- A retry moves its row in every index, so it is taken out and put back: rows found
    -- by their place leave the planner no join to choose.
    with taken as (
        delete from live_job as l
        where l.ctid = any (v_rows) and l.lease_expires_at > clock_timestamp()
        returning l.*, clock_timestamp() as ended_at
    ),
    decided as materialized (
        select
            t.*, i.failure_code, i.retryable,
            case when i.retryable and t.attempt < t.max_attempts
                then _retry_at(
                    t.ended_at, t.attempt,
                    n.retry_base_seconds, n.retry_max_seconds, n.retry_jitter
                )
            end as retry_at
        from instance as n
        cross join taken as t
        cross join lateral (
            select v_codes[p.n] as failure_code, v_retryable[p.n] as retryable
            from array_position(v_job_ids, t.job_id) as p (n)
        ) as i
    ),
    requeued as (
        insert into live_job (
            job_id, available_at, attempt, max_attempts, queue, last_failure_code
        )
        select
            d.job_id, d.retry_at, d.attempt, d.max_attempts, d.queue, d.failure_code
        from decided as d
        where d.retry_at is not null
        returning queue
    ),
    evidence as (
        insert into attempt (
            job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
            retryable, worker, outcome, failure_code, lease_token_hash
        )
        select
            d.job_id, d.leased_at, d.ended_at, d.retry_at, d.attempt, d.max_attempts,
            d.retryable, d.lease_owner,
            case when d.retry_at is null then 'failed' else 'retried' end,
            d.failure_code, d.lease_token_hash
        from decided as d
    )
    select array_agg(distinct r.queue) into v_queues from requeued as r;
    perform _wake(q.queue)
    from unnest(v_queues) as q (queue)
    where _is_awaited(q.queue);

    return query
    select
        i.ordinality::integer,
        i.job_id,
        case
            when not _is_name(i.failure_code, 128) or i.retryable is null
                then 'invalid_failure'
            when a.job_id is null then 'invalid_lease'
            when a.outcome = 'retried' then 'queued'
            else 'failed'
        end,
        a.retry_at::timestamptz
    from unnest(p_job_ids, p_lease_tokens, p_failure_codes, p_retryable)
    with ordinality as i (job_id, lease_token, failure_code, retryable)
    left join lateral (
        select e.*
        from attempt as e
        where e.job_id = i.job_id
        order by e.attempt
        offset 0
    ) as a
        on
            a.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and a.worker = v_caller
            and a.failure_code = i.failure_code collate "C"
            and a.retryable = i.retryable
    order by i.ordinality;
end;
$$;
comment on function fail_many(uuid[], text[], text[], boolean[]) is
'Fails many attempts at once and answers one row an item in input order: queued with '
'the time it falls due, failed, invalid_lease or invalid_failure. Refuses other than '
'four parallel lists of 1 to 1000 items (LJ007).';
