create or replace function complete_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof completed_item
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
    v_caller text collate "C" := _caller();
    v_rows   tid[];
    v_ended  integer;
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

    -- Rows are locked in the order of their ids, as everywhere, and the leases judged
    -- when the last of them is: one may end while the call waits for another's row.
    select array_agg(m.ctid) into v_rows
    from (
        select i.job_id, sha256(convert_to(i.lease_token, 'UTF8')) as lease_token_hash
        from unnest(p_job_ids, p_lease_tokens) as i (job_id, lease_token)
        order by i.job_id
    ) as i
    cross join lateral (
        select l.ctid
        from live_job as l
        where
            l.job_id = i.job_id
            and l.lease_token_hash = i.lease_token_hash
            and l.lease_owner = v_caller
        for update
    ) as m;

    with ended as (
        delete from live_job as l
        where l.ctid = any (v_rows) and l.lease_expires_at > clock_timestamp()
        returning l.*, clock_timestamp() as ended_at
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        worker, outcome, lease_token_hash
    )
    select
        e.job_id, e.leased_at, e.ended_at, e.attempt, e.max_attempts,
        e.lease_owner, 'succeeded', e.lease_token_hash
    from ended as e;
    get diagnostics v_ended = row_count;
    if v_ended = cardinality(p_job_ids) then
        return query
        select i.ordinality::integer, i.job_id, 'completed'
        from unnest(p_job_ids) with ordinality as i (job_id);
        return;
    end if;

    -- The evidence tells an item whose first answer was lost, or that was given twice,
    -- from one whose lease is gone. It is read by job before it is judged: the outcome
    -- in the inner query would let the index of ends be walked from end to end.
    return query
    select
        i.ordinality::integer,
        i.job_id,
        case when a.job_id is null then 'invalid_lease' else 'completed' end
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
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
            and a.outcome = 'succeeded'
    order by i.ordinality;
end;
$$;
comment on function complete_many(uuid[], text[]) is
'Completes many jobs at once and answers one row an item in input order: completed or '
'invalid_lease. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
