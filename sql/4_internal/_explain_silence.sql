-- What a person on call looks at when nothing is claimed: one line each.
create or replace function _explain_silence(p_queue text)
returns text language plpgsql stable as $$
declare
    v_now  timestamptz := clock_timestamp();
    v_text text;
begin
    with front as (select f.* from _queue_front(p_queue, v_now) as f),
    line (place, text) as (
        select 1,
            coalesce(
                'last claim of the queue: ' || greatest(
                    f.last_claimed_at,
                    (
                        select max(e.leased_at)
                        from (
                            select i.leased_at
                            from _queue_ends('-infinity', 10000) as i
                            where i.queue = p_queue
                            limit 100
                        ) as e
                    )
                ), 'no claim of the queue is on record'
            )
        from front as f
        union all
        select 2,
            'sessions that wait for the queue: '
            || coalesce(_session_waiting(p_queue)::text, 'hidden (pg_locks)')
        union all
        select 3,
            format(
                'sessions that may act as worker %s: %s', w.worker,
                coalesce(w.sessions::text, 'hidden (pg_stat_activity)')
            )
        from _session_workers() as w
        union all
        select 4,
            concat(
                'live leases in the queue: ', f.live,
                ', the oldest since ' || f.oldest_leased_at
            )
        from front as f
        union all
        select 5, concat_ws(' ', f.subject, f.detail) || ': ' || f.remedy
        from unnest(array['roles', 'settings']) as p (part)
        cross join lateral _health_part(p.part) as f
        where f.finding in ('setting_harmful', 'not_readable')
            or f.subject in (select c.caller from caller as c where c.is_worker)
        union all
        select 6, format('%s has %s = %s: %s', s.place, s.setting, s.value, s.remedy)
        from _session_settings() as s
        where not s.is_harmful
        union all
        select 7, format('role %s %s', r.rolname, b.detail)
        from caller as c
        join pg_roles as r on r.rolname = c.caller
        cross join lateral (
            values
                (
                    not exists (
                        select from pg_roles as o
                        where o.rolcanlogin
                            and not o.rolsuper
                            and pg_has_role(o.oid, r.oid, 'member')
                            and has_database_privilege(
                                o.oid, current_database(), 'connect'
                            )
                    ),
                    'cannot log in to this database, nor can a role that may act as it'
                ),
                (r.rolconnlimit = 0, 'has a connection limit of 0'),
                (
                    r.rolvaliduntil < clock_timestamp(),
                    'has a password that is valid no longer'
                )
        ) as b (is_so, detail)
        where c.is_worker and b.is_so
    )
    select string_agg(l.text, chr(10) order by l.place, l.text) into v_text
    from line as l;
    return v_text;
end;
$$;
comment on function _explain_silence(text) is
'What may keep the workers of a queue from claiming, one line each.';
