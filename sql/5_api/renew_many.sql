create or replace function renew_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof renewed_item
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
declare
    v_mine uuid[];
    v_now  timestamptz;
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

    -- A row that somebody holds is passed over: waiting behind this worker's own
    -- uncommitted complete would let its other leases run out. One element an item,
    -- NULL where nothing was locked.
    select array_agg(m.job_id order by i.ordinality)
    into v_mine
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral (
        select l.job_id
        from live_job as l
        where
            l.job_id = i.job_id
            and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        for update skip locked
    ) as m on true;

    v_now := clock_timestamp();
    update live_job as l
    set lease_expires_at = greatest(
        l.lease_expires_at, v_now + make_interval(secs => n.lease_seconds)
    )
    from instance as n
    where l.job_id = any (v_mine) and l.lease_expires_at > v_now;

    return query
    select
        i.ordinality::integer,
        i.job_id,
        case when v_mine[i.ordinality] is not null
            then l.lease_expires_at::timestamptz
        end,
        case
            when l.job_id is null then 'invalid_lease'
            when v_mine[i.ordinality] is null then 'busy'
            else 'renewed'
        end
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral (
        select e.* from live_job as e where e.job_id = i.job_id offset 0
    ) as l
        on
            l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
            and (v_mine[i.ordinality] is null or l.lease_expires_at > v_now)
    order by i.ordinality;
end;
$$;
comment on function renew_many(uuid[], text[]) is
'Renews many leases at once and answers one row an item in input order: renewed with '
'its new end, invalid_lease, or busy where another session holds the job''s row at the '
'moment. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
