-- The lists of codes, marks and delays count from 1. Without codes it releases.
create or replace function _lease_give_back(
    p_job_ids uuid[], p_lease_tokens text[], p_failure_codes text[],
    p_retryable boolean[], p_delays_seconds integer[]
)
returns setof failed_item
language plpgsql volatile as $$
declare
    v_caller text      collate "C" := _caller();
    v_valid  boolean[] := array(
        select case
            when p_failure_codes is null
                then coalesce(u.delay_seconds between 0 and 86400, false)
            else
                _is_name(u.failure_code, 128) and u.retryable is not null
                and coalesce(u.delay_seconds >= 0, true)
        end
        from unnest(p_failure_codes, p_retryable, p_delays_seconds)
        with ordinality as u (failure_code, retryable, delay_seconds, item)
        order by u.item
    );
    v_rows   tid[];
    v_items  integer[];
    v_queues text[];
begin
    -- Rows are locked in the order of their ids, as everywhere. Of items with the same
    -- lease the first one counts. A job that was released 100 times keeps its lease.
    select array_agg(l.ctid order by i.item), array_agg(i.item order by i.item)
    into v_rows, v_items
    from (
        select u.job_id, u.lease_token, u.item::integer
        from unnest(p_job_ids, p_lease_tokens, v_valid)
        with ordinality as u (job_id, lease_token, is_valid, item)
        where u.is_valid
        order by u.job_id
    ) as i
    cross join lateral (
        select l.ctid
        from live_job as l
        where l.job_id = i.job_id
            and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = v_caller
            and (
                p_failure_codes is not null
                or 100 > (
                    select count(*)
                    from attempt as e
                    where e.job_id = l.job_id and e.outcome = 'released'
                )
            )
        for update
    ) as l;

    -- The statement that writes reads the clock, behind every lock. A retry moves its
    -- row in every index, so the row is taken out and put back: rows found by their
    -- place leave the planner no join to choose.
    with taken as (
        delete from live_job as l
        where l.ctid = any (v_rows) and l.lease_expires_at > clock_timestamp()
        returning
            l.*, clock_timestamp() as ended_at,
            v_items[array_position(v_rows, l.ctid)] as item
    ),
    decided as materialized (
        select t.*, i.*,
            case
                when p_failure_codes is null and i.delay_seconds = 0 then t.available_at
                when p_failure_codes is null
                    then t.ended_at + make_interval(secs => i.delay_seconds)
                when i.retryable and t.attempt < t.max_attempts
                    then _lease_retry_at(
                        t.ended_at, t.attempt,
                        n.retry_base_seconds, n.retry_max_seconds, n.retry_jitter,
                        i.delay_seconds
                    )
            end as retry_at
        from taken as t
        left join instance as n on true
        cross join lateral (
            values (
                p_failure_codes[t.item], p_retryable[t.item], p_delays_seconds[t.item]
            )
        ) as i (failure_code, retryable, delay_seconds)
    ),
    requeued as (
        insert into live_job (
            job_id, available_at, attempt, max_attempts, payload_bytes, queue,
            last_failure_code
        )
        select d.job_id, d.retry_at, d.attempt,
            case
                when p_failure_codes is null
                    then least(d.max_attempts, 2147483646) + 1
                else d.max_attempts
            end,
            d.payload_bytes, d.queue, coalesce(d.failure_code, d.last_failure_code)
        from decided as d
        where d.retry_at is not null
        returning queue
    ),
    evidence as (
        insert into attempt (
            job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
            retryable, queue, worker, outcome, failure_code, lease_token_hash, holder
        )
        select d.job_id, coalesce(d.leased_at, d.ended_at), d.ended_at, d.retry_at,
            d.attempt, d.max_attempts, d.retryable, d.queue, d.lease_owner,
            case
                when p_failure_codes is null then 'released'
                when d.retry_at is null then 'failed'
                else 'retried'
            end,
            d.failure_code, d.lease_token_hash, d.holder
        from decided as d
    )
    select array_agg(distinct r.queue) into v_queues from requeued as r;
    perform _queue_wake(q.queue)
    from unnest(v_queues) as q (queue)
    where _queue_is_awaited(q.queue);

    -- A lease that is still live was refused for its job's many releases.
    return query
    select i.item::integer, i.job_id,
        case
            when not i.is_valid and p_failure_codes is not null
                then 'invalid_failure'
            when not i.is_valid then 'invalid_argument'
            when a.outcome = 'failed' then 'failed'
            when a.outcome is not null then 'queued'
            when exists (
                select
                from live_job as l
                where l.job_id = i.job_id
                    and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
                    and l.lease_owner = v_caller
                    and l.lease_expires_at > clock_timestamp()
            ) then 'invalid_argument'
            else 'invalid_lease'
        end,
        a.retry_at
    from unnest(p_job_ids, p_lease_tokens, v_valid)
    with ordinality as i (job_id, lease_token, is_valid, item)
    left join lateral _lease_evidence(i.job_id, i.lease_token) as a
        on i.is_valid and case
            when p_failure_codes is null then a.outcome = 'released'
            else
                a.failure_code = p_failure_codes[i.item] collate "C"
                and a.retryable = p_retryable[i.item]
        end
    order by i.item;
end;
$$;
comment on function _lease_give_back(uuid[], text[], text[], boolean[], integer[]) is
'Ends attempts that did not succeed: they are released without failure codes, else '
'they failed. Returns one row an item in input order: queued, failed, invalid_lease, '
'invalid_failure, or invalid_argument for a delay out of range or too many releases.';
