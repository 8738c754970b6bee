create or replace function enforce_retention(p_limit integer default 1000)
returns integer
language plpgsql security definer
set search_path from current as $$
declare
    v_before timestamptz;
begin
    perform _require_range('limit', p_limit, 1, 10000);

    select clock_timestamp() - make_interval(secs => i.retention_seconds)
    into v_before
    from instance as i;
    if not found then
        perform _require_policy();
    end if;
    if v_before is null then
        return 0;
    end if;

    -- The audit outlives the jobs: what was done to them is asked for later.
    delete from operator_act as o
    where o.operator_act_id in (
        select a.operator_act_id
        from (
            select k.* from operator_act as k order by k.operator_act_id limit p_limit
        ) as a
        where a.acted_at < least(v_before, clock_timestamp() - interval '400 days')
    );
    return purge(v_before, p_limit);
end;
$$;
comment on function enforce_retention(integer) is
'Purges up to p_limit jobs that ended longer than retention_seconds ago and returns '
'how many: 0 where none is set. Deletes up to p_limit operator acts older than 400 '
'days, or than retention_seconds where that is longer. For any scheduler: call it '
'until it returns fewer than p_limit. Audited as purge. Refuses other than 1 to 10000 '
'jobs (LJ007), and every call while no policy is stored (LJ008).';
