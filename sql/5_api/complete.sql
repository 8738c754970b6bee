create or replace function complete(p_job_id uuid, p_lease_token text)
returns boolean
language plpgsql
security definer
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
        where
            l.job_id = p_job_id
            and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        returning l.*
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        worker, outcome, lease_token_hash
    )
    select
        e.job_id, e.leased_at, clock_timestamp(), e.attempt, e.max_attempts,
        e.lease_owner, 'succeeded', e.lease_token_hash
    from ended as e
    where e.lease_expires_at > clock_timestamp();
    if found then
        return true;
    end if;

    -- The first answer may have been lost on its way. Read by job before it is judged:
    -- the outcome in the inner query would let the index of ends be walked.
    perform
    from (
        select e.* from attempt as e where e.job_id = p_job_id offset 0
    ) as a
    where
        a.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
        and a.worker = _caller()
        and a.outcome = 'succeeded';
    if not found then
        raise exception using
            errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;
    return true;
end;
$$;
comment on function complete(uuid, text) is
'Ends a job as succeeded, in the caller''s transaction; repeated under the same lease '
'it answers true once more. Refuses a lease that is not live and the caller''s own '
'(LJ004).';
