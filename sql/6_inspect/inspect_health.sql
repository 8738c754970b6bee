create or replace function inspect_health()
returns setof inspected_finding
language plpgsql stable security definer
set search_path from current as $$
declare
    v_parts text[] := array[
        'sessions', 'objects', 'roles', 'settings', 'history', 'queues', 'failures',
        'rows', 'storage', 'server'
    ];
begin
    return query
    select 'critical', 'object_changed', t.subject, null::timestamptz, t.detail,
        'lenso-jobs check'
    from _catalogue_lost_table() as t;
    if found then
        return;
    end if;

    -- Behind a lock on a whole table the other parts would wait, too.
    if (_explain_lock(null, null)).reason is not null then
        v_parts := array['sessions'];
    end if;

    return query
    select h.severity, f.finding, f.subject, f.since, f.detail,
        coalesce(f.remedy, h.remedy)
    from unnest(v_parts) as p (part)
    cross join lateral _health_part(p.part) as f
    join health_finding as h on h.finding = f.finding
    order by
        array_position(array['critical', 'warning', 'notice'], h.severity),
        -- Causes before what comes of them.
        f.finding in ('queue_silent', 'queue_behind', 'leases_expired'),
        f.finding, f.subject;
exception when others then
    return query
    select 'critical', 'object_changed', 'objects', null::timestamptz,
        'cannot be read: ' || sqlerrm, 'lenso-jobs check';
end;
$$;
comment on function inspect_health() is
'One row for each thing that is wrong: how bad, what, with which object, since when, '
'and what to do; none while all is well. health_finding lists them all. For since when '
'transactions of other roles are open, the owner needs pg_read_all_stats.';
