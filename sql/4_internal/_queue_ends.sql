-- 10,000 ends are what a busy Instance has in a second or so.
create or replace function _queue_ends(
    p_since timestamptz, p_limit integer default 10000
)
returns table (
    job_id uuid, queue text, has_failed boolean, failure_code text,
    leased_at timestamptz, ended_at timestamptz
)
language sql stable as $$
    select a.job_id, a.queue::text, a.outcome <> 'succeeded', a.failure_code::text,
        a.leased_at::timestamptz, a.ended_at::timestamptz
    from attempt as a
    where a.ended_at > p_since
        and (
            a.outcome in ('succeeded', 'failed') or a.failure_code = 'attempts_exhausted'
        )
    order by a.ended_at desc
    limit p_limit
$$;
comment on function _queue_ends(timestamptz, integer) is
'The last ends of jobs since a time, newest first, so many at most.';
