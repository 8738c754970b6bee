create or replace function renew(p_job_id uuid, p_lease_token text)
returns timestamptz
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_expires_at timestamptz;
begin
    -- Only the caller's own lease is locked: a made-up token holds up nobody. The lock
    -- may be waited for, and so may the UPDATE's on the table, which judges the lease.
    perform
    from live_job as l
    where l.job_id = p_job_id
        and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
        and l.lease_owner = _caller()
    for update;
    if found then
        update live_job as l
        set lease_expires_at = greatest(
            l.lease_expires_at, clock_timestamp() + make_interval(secs => i.lease_seconds)
        )
        from instance as i
        where l.job_id = p_job_id and l.lease_expires_at > clock_timestamp()
        returning l.lease_expires_at::timestamptz into v_expires_at;
    end if;

    if v_expires_at is null then
        perform _require_policy();
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: stop this work.';
    end if;
    return v_expires_at;
end;
$$;
comment on function renew(uuid, text) is
'Extends a live lease to the Instance''s lease_seconds from now and returns its new '
'end. A lease is never shortened. Refuses a lease that is not live or not the '
'caller''s own (LJ004), and every call while no policy is stored (LJ008).';
