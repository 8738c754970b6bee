create or replace function inspect_key(
    p_idempotency_key text, p_producer text default null
)
returns inspected_job
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_tables();

    -- In an old snapshot a purged job may be visible beside the newer one.
    return inspect(
        (
            select j.job_id
            from (
                select i.job_id
                from job as i
                where i.producer = coalesce(p_producer, _caller()) collate "C"
                    and i.idempotency_key = p_idempotency_key collate "C"
                offset 0
            ) as j
            order by j.job_id desc
            limit 1
        )
    );
end;
$$;
comment on function inspect_key(text, text) is
'What inspect returns, for the job that a producer enqueued under a key; by default '
'the caller''s own. Refuses an unknown key, and to a producer the key of another '
'producer (LJ006).';
