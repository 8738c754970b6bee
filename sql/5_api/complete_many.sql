create or replace function complete_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof completed_item
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
        array[array_ndims(p_job_ids), array_ndims(p_lease_tokens)],
        array[cardinality(p_job_ids), cardinality(p_lease_tokens)]
    ) then
        raise exception using
            errcode = 'LJ007',
            message = 'job_ids and lease_tokens must be parallel lists of 1 to 1000 '
                      'items';
    end if;

    -- Rows are locked in the order of their ids, as everywhere, and each lease is
    -- judged by what the lock returned: the delete itself sees an older version.
    with mine as materialized (
        select l.*
        from unnest(p_job_ids, p_lease_tokens) as i (job_id, lease_token)
        join live_job as l
            on
                l.job_id = i.job_id
                and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
                and l.lease_owner = _caller()
        order by l.job_id
        for update of l
    ),
    ended as (
        delete from live_job as l
        using mine as m
        where l.job_id = m.job_id and m.lease_expires_at > clock_timestamp()
        returning m.*
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        worker, outcome, lease_token_hash
    )
    select
        e.job_id, e.leased_at, clock_timestamp(), e.attempt, e.max_attempts,
        e.lease_owner, 'succeeded', e.lease_token_hash
    from ended as e;

    -- The answers are read from the evidence, which also repeats an answer that was
    -- lost, and answers an item given twice twice.
    return query
    select
        i.ordinality::integer,
        i.job_id,
        case when a.job_id is null then 'invalid_lease' else 'completed' end
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join attempt as a
        on
            a.job_id = i.job_id
            and a.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and a.worker = _caller()
            and a.outcome = 'succeeded'
    order by i.ordinality;
end;
$$;
comment on function complete_many(uuid[], text[]) is
'Completes many jobs at once and answers one row an item in input order: completed or '
'invalid_lease. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
