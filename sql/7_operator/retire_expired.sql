create or replace function retire_expired(p_limit integer default 1000)
returns integer
language plpgsql security definer
set search_path from current
set jit = off
as $$
declare
    v_count integer;
begin
    perform _require_range('limit', p_limit, 1, 10000);

    -- No index leads here, since every claim would write an index on the lease: this
    -- reads all live rows, for an operator's hand and not for a loop.
    v_count := _claim_reclaim(
        array(
            select l.job_id
            from live_job as l
            where l.attempt >= l.max_attempts
                and (
                    l.lease_expires_at is null
                    or l.lease_expires_at <= clock_timestamp()
                )
            limit p_limit
            for update skip locked
        ),
        p_limit
    );

    if v_count > 0 then
        insert into operator_act (operator, act, arguments, job_count)
        values (
            _caller(), 'retire_expired', jsonb_build_object('limit', p_limit), v_count
        );
    end if;
    return v_count;
end;
$$;
comment on function retire_expired(integer) is
'Ends up to p_limit jobs whose last attempt''s lease ran out, as claim does while it '
'passes, and returns how many; audited. Refuses other than 1 to 10000 jobs (LJ007).';
