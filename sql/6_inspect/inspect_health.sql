create or replace function inspect_health()
returns setof inspected_finding
language plpgsql
stable
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_missing text := _missing_table();
begin
    if v_missing is not null then
        return query
        select
            h.severity, h.finding, 'table ' || v_missing, null::timestamptz,
            'is missing', h.remedy
        from health_finding as h
        where h.finding = 'object_changed';
        return;
    end if;

    -- Behind a lock on a whole table everything else would wait, too.
    if (_explained_lock(null, null)).reason is not null then
        return query
        select h.severity, f.finding, f.subject, f.since, f.detail, h.remedy
        from _faults_of_sessions() as f
        join health_finding as h on h.finding = f.finding;
        return;
    end if;

    return query
    with found as (
        select s.* from _faults_of_sessions() as s
        union all
        select o.* from _faults_of_objects() as o
        union all
        select r.* from _faults_of_roles() as r
        union all
        select h.* from _faults_of_history() as h
        union all
        select q.* from _faults_of_queues() as q
        union all
        select s.* from _faults_of_storage() as s
    )
    select h.severity, f.finding, f.subject, f.since, f.detail, h.remedy
    from found as f
    join health_finding as h on h.finding = f.finding
    order by
        array_position(array['critical', 'warning', 'notice'], h.severity),
        -- Causes before what comes of them.
        f.finding in ('queue_silent', 'queue_behind', 'leases_expired'),
        f.finding, f.subject;
end;
$$;
comment on function inspect_health() is
'One row for each thing that is wrong: how bad, what, with which object, since when, '
'and what to do; none while all is well. health_finding lists them all. For since when '
'transactions of other roles are open, the owner needs pg_read_all_stats.';
