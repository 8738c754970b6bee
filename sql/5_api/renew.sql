create or replace function renew(p_job_id uuid, p_lease_token text)
returns timestamptz
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_expires_at timestamptz;
    v_lease      interval;
    v_now        timestamptz;
begin
    -- Only the caller's own lease is locked: a made-up token holds up nobody.
    select l.lease_expires_at::timestamptz, make_interval(secs => i.lease_seconds)
    into v_expires_at, v_lease
    from live_job as l
    cross join instance as i
    where
        l.job_id = p_job_id
        and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
        and l.lease_owner = _caller()
    for update of l;

    -- The lock may have been waited for, so the clock is read behind it.
    v_now := clock_timestamp();
    if (v_expires_at > v_now) is not true then
        raise exception using
            errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: stop this work.';
    end if;

    update live_job as l
    set lease_expires_at = greatest(v_expires_at, v_now + v_lease)
    where l.job_id = p_job_id
    returning l.lease_expires_at::timestamptz into v_expires_at;
    return v_expires_at;
end;
$$;
comment on function renew(uuid, text) is
'Extends a live lease by the Instance''s lease_seconds from now, never shortening it, '
'and answers its new end. Refuses a lease that is not live and the caller''s own '
'(LJ004).';
