create or replace function complete_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof completed_item
language plpgsql security definer
set search_path from current as $$
declare
    v_caller text collate "C" := _caller();
    v_rows   tid[];
    v_ended  integer;
begin
    perform _require_batch(
        'job_ids and lease_tokens',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:])
    );

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
        where l.job_id = i.job_id
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
        queue, worker, outcome, lease_token_hash, holder
    )
    select e.job_id, coalesce(e.leased_at, e.ended_at), e.ended_at, e.attempt,
        e.max_attempts, e.queue, e.lease_owner, 'succeeded', e.lease_token_hash, e.holder
    from ended as e;
    get diagnostics v_ended = row_count;
    if v_ended = cardinality(p_job_ids) then
        return query
        select i.ordinality::integer, i.job_id, 'completed'
        from unnest(p_job_ids) with ordinality as i (job_id);
        return;
    end if;

    return query
    select i.ordinality::integer, i.job_id,
        case when a.outcome is null then 'invalid_lease' else 'completed' end
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral _lease_evidence(i.job_id, i.lease_token) as a
        on a.outcome = 'succeeded'
    order by i.ordinality;
end;
$$;
comment on function complete_many(uuid[], text[]) is
'Completes many jobs at once. Returns one row an item in input order: completed or '
'invalid_lease. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
