create or replace function release_many(
    p_job_ids uuid[], p_lease_tokens text[], p_delays_seconds integer[]
)
returns setof failed_item
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_batch(
        'job_ids, lease_tokens and delays_seconds',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:]),
        array_dims(p_delays_seconds[:])
    );
    perform _require_policy();
    return query select r.* from _lease_give_back(
        p_job_ids, p_lease_tokens, null, null, p_delays_seconds[:]
    ) as r;
end;
$$;
comment on function release_many(uuid[], text[], integer[]) is
'Releases many leases at once. Returns one row an item in input order: queued with the '
'time the job falls due, invalid_lease, or invalid_argument where the delay is not 0 '
'to 86400 seconds or the job was released 100 times before. Refuses other than three '
'parallel lists of 1 to 1000 items (LJ007), and every call while no policy is stored '
'(LJ008).';
