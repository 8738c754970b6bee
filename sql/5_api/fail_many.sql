create or replace function fail_many(
    p_job_ids uuid[], p_lease_tokens text[], p_failure_codes text[],
    p_retryable boolean[], p_retry_after_seconds integer[] default null
)
returns setof failed_item
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_batch(
        'job_ids, lease_tokens, failure_codes, retryable and retry_after_seconds',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:]),
        array_dims(p_failure_codes[:]), array_dims(p_retryable[:]),
        case
            when p_retry_after_seconds is null then array_dims(p_job_ids[:])
            else array_dims(p_retry_after_seconds[:])
        end
    );
    if true = any (p_retryable) then
        perform _require_policy();
    end if;
    return query select f.* from _lease_give_back(
        p_job_ids, p_lease_tokens, p_failure_codes[:], p_retryable[:],
        p_retry_after_seconds[:]
    ) as f;
end;
$$;
comment on function fail_many(uuid[], text[], text[], boolean[], integer[]) is
'Fails many attempts at once. Returns one row an item in input order: queued with the '
'time it falls due, failed, invalid_lease or invalid_failure. Refuses other than '
'parallel lists of 1 to 1000 items (LJ007) and a retryable failure while no policy is '
'stored (LJ008).';
