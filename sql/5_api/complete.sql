create or replace function complete(p_job_id uuid, p_lease_token text)
returns boolean
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
begin
    -- The insert judges the lease once the delete holds the row. Where it has expired,
    -- nothing is inserted and the refusal below undoes the delete.
    with ended as (
        delete from live_job as l
        where l.job_id = p_job_id
            and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        returning l.*
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        queue, worker, outcome, lease_token_hash, holder
    )
    select e.job_id, coalesce(e.leased_at, clock_timestamp()), clock_timestamp(),
        e.attempt, e.max_attempts, e.queue, e.lease_owner, 'succeeded',
        e.lease_token_hash, e.holder
    from ended as e
    where e.lease_expires_at > clock_timestamp();
    if found then
        return true;
    end if;

    perform
    from _lease_evidence(p_job_id, p_lease_token) as a
    where a.outcome = 'succeeded';
    if not found then
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;
    return true;
end;
$$;
comment on function complete(uuid, text) is
'Ends a job as succeeded, in the caller''s transaction; repeated under the same lease '
'it returns true once more. Refuses a lease that is not live and the caller''s own '
'(LJ004).';
