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
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
as $$
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
    with mine as materialized (
        select l.*, i.ordinality, i.failure_code, i.retryable
        from unnest(p_job_ids, p_lease_tokens, p_failure_codes, p_retryable)
        with ordinality as i (job_id, lease_token, failure_code, retryable)
        join live_job as l
            on
                l.job_id = i.job_id
                and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
                and l.lease_owner = _caller()
        where _is_name(i.failure_code, 128) and i.retryable is not null
        order by l.job_id
        for update of l
    ),
    judged as materialized (
        select distinct on (m.job_id) m.*, clock_timestamp() as ended_at
        from mine as m
        where m.lease_expires_at > clock_timestamp()
        order by m.job_id, m.ordinality
    ),
    decided as materialized (
        select
            j.*,
            case when j.retryable and j.attempt < j.max_attempts
                then _retry_at(
                    j.ended_at, j.attempt,
                    n.retry_base_seconds, n.retry_max_seconds, n.retry_jitter
                )
            end as retry_at
        from judged as j
        cross join instance as n
    ),
    requeued as (
        update live_job as l
        set
            available_at = d.retry_at,
            leased_at = null,
            lease_expires_at = null,
            lease_owner = null,
            lease_token_hash = null,
            last_failure_code = d.failure_code
        from decided as d
        where l.job_id = d.job_id and d.retry_at is not null
    ),
    ended as (
        delete from live_job as l
        using decided as d
        where l.job_id = d.job_id and d.retry_at is null
    )
    insert into attempt (
        job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
        retryable, worker, outcome, failure_code, lease_token_hash
    )
    select
        d.job_id, d.leased_at, d.ended_at, d.retry_at, d.attempt, d.max_attempts,
        d.retryable, d.lease_owner,
        case when d.retry_at is null then 'failed' else 'retried' end,
        d.failure_code, d.lease_token_hash
    from decided as d;

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
    left join attempt as a
        on
            a.job_id = i.job_id
            and a.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and a.worker = _caller()
            and a.failure_code = i.failure_code
            and a.retryable = i.retryable
    order by i.ordinality;
end;
$$;
comment on function fail_many(uuid[], text[], text[], boolean[]) is
'Fails many attempts at once and answers one row an item in input order: queued with '
'the time it falls due, failed, invalid_lease or invalid_failure. Refuses other than '
'four parallel lists of 1 to 1000 items (LJ007).';
