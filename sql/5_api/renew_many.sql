create or replace function renew_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof renewed_item
language plpgsql security definer
set search_path from current as $$
declare
    v_mine uuid[];
begin
    perform _require_policy();
    perform _require_batch(
        'job_ids and lease_tokens',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:])
    );

    -- A row that another session holds is passed over: waiting behind this worker's own
    -- uncommitted complete would let its other leases run out. One element an item,
    -- NULL where nothing was locked.
    select array_agg(m.job_id order by i.ordinality)
    into v_mine
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral (
        select l.job_id
        from live_job as l
        where l.job_id = i.job_id
            and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        for update skip locked
    ) as m on true;

    update live_job as l
    set lease_expires_at = greatest(
        l.lease_expires_at, clock_timestamp() + make_interval(secs => i.lease_seconds)
    )
    from instance as i
    where l.job_id = any (v_mine) and l.lease_expires_at > clock_timestamp();

    return query
    select i.ordinality::integer, i.job_id,
        case when i.mine is not null then l.lease_expires_at::timestamptz end,
        case
            when l.job_id is null then 'invalid_lease'
            when i.mine is null then 'busy'
            else 'renewed'
        end
    from unnest(p_job_ids, p_lease_tokens, v_mine)
    with ordinality as i (job_id, lease_token, mine)
    left join lateral (
        select e.* from live_job as e where e.job_id = i.job_id offset 0
    ) as l
        on
            l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
            and (i.mine is null or l.lease_expires_at > clock_timestamp())
    order by i.ordinality;
end;
$$;
comment on function renew_many(uuid[], text[]) is
'Renews many leases at once. Returns one row an item in input order: renewed with its '
'new end, invalid_lease, or busy where another session holds the job''s row at the '
'moment. Refuses other than two parallel lists of 1 to 1000 items (LJ007), and every '
'call while no policy is stored (LJ008).';
