create or replace function enforce_retention(p_limit integer default 1000)
returns integer
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
declare
    v_before timestamptz;
begin
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;

    select clock_timestamp() - make_interval(secs => i.retention_seconds)
    into v_before
    from instance as i;
    return case when v_before is null then 0 else purge(v_before, p_limit) end;
end;
$$;
comment on function enforce_retention(integer) is
'Purges up to p_limit jobs that ended longer than retention_seconds ago, and answers '
'how many: 0 where none is set. For any scheduler, again and again until it answers '
'fewer than p_limit; audited as purge. Refuses other than 1 to 10000 jobs (LJ007).';
