create or replace function _queue_front(p_queue text, p_now timestamptz)
returns table (
    live bigint, broken bigint, oldest_lapse_at timestamptz,
    oldest_leased_at timestamptz, last_claimed_at timestamptz
)
language sql stable as $$
    select count(*) filter (where f.lease_expires_at > p_now),
        count(*) filter (
            where _lease_is_broken(
                f.leased_at, f.lease_expires_at, f.lease_owner, f.lease_token_hash
            )
        ),
        min(f.lease_expires_at) filter (where f.lease_expires_at <= p_now),
        min(f.leased_at) filter (where f.lease_expires_at > p_now),
        max(f.leased_at)
    from (
        select l.*
        from live_job as l
        where l.queue = p_queue collate "C" and l.available_at <= p_now
        order by l.available_at, l.job_id
        limit 10000
    ) as f
$$;
comment on function _queue_front(text, timestamptz) is
'The leases among the first 10,000 due jobs of a queue, where claims begin.';
