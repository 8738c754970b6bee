create or replace function _health_sessions()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with seen as (
        select s.*, h.place is not null as is_writing, h.locked,
            clock_timestamp() - s.since as age,
            format(
                '(%s, %s)',
                -- A slot has no session, and no role.
                case
                    when s.place is null then s.owner
                    else coalesce('role ' || s.owner, 'of an unknown role')
                end,
                -- Where the time is hidden the age in transactions must do.
                case
                    when s.since is not null
                        then 'open for '
                        || date_trunc('second', clock_timestamp() - s.since)
                    when coalesce(s.xmin, s.xid) is null then 'since when is hidden'
                    else age(coalesce(s.xmin, s.xid)) || ' transactions old'
                end
            ) as facts
        from _session_list() as s
        left join _session_locks() as h on h.place = s.place
    )
    select 'table_locked', s.name, s.since, concat_ws(' ', s.locked, s.facts), s.remedy
    from seen as s
    where s.locked is not null
    union all
    select 'transaction_open', s.name, s.since,
        'wrote to this Instance and has not ended ' || s.facts, s.remedy
    from seen as s
    where s.is_writing
        and s.locked is null
        and coalesce(s.age > interval '1 minute', age(s.xid) > 1000)
    union all
    select
        'snapshot_held', s.name, s.since, 'holds an old snapshot ' || s.facts, s.remedy
    from seen as s
    where s.xmin is not null
        -- Standbys tell of theirs every ten seconds, many transactions late.
        and coalesce(
            s.age > interval '5 minutes',
            age(s.xmin) > case when s.is_remote then 100000 else 5000 end
        )
$$;
comment on function _health_sessions() is
'Locked tables, open transactions and old snapshots, for inspect_health.';
