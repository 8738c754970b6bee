create or replace function retire_expired(p_limit integer default 1000)
returns integer
language plpgsql
security definer
set search_path from current
set jit = off
as $$
declare
    v_count integer;
begin
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;

    -- No index leads here, since one on the lease would be written by every claim: a
    -- walk over the live rows, for an operator's hand and not for a loop.
    v_count := _reclaim(
        array(
            select l.job_id
            from live_job as l
            where
                l.lease_expires_at <= clock_timestamp()
                and l.attempt >= l.max_attempts
            limit p_limit
            for update skip locked
        ),
        p_limit
    );

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'retire_expired', jsonb_build_object('limit', p_limit), v_count
    );
    return v_count;
end;
$$;
comment on function retire_expired(integer) is
'Ends up to p_limit jobs whose last attempt''s lease ran out, as claim does while it '
'passes, and answers how many; audited. Refuses other than 1 to 10000 jobs (LJ007).';
