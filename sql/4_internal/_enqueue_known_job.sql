-- To an old snapshot a purged row may show beside this transaction's own, the newest.
-- Behind the fence only the key's own index serves. The planner inlines this.
create or replace function _enqueue_known_job(
    p_producer text, p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer
)
returns table (job_id uuid, is_same boolean)
language sql stable as $$
    select j.job_id,
        (j.queue, j.kind, j.payload, j.max_attempts)
        = (p_queue collate "C", p_kind collate "C", p_payload, p_max_attempts)
        and j.available_at is not distinct from p_available_at
    from (
        select i.*
        from job as i
        where i.producer = p_producer collate "C"
            and i.idempotency_key = p_idempotency_key collate "C"
        offset 0
    ) as j
    order by j.job_id desc
    limit 1
$$;
comment on function
_enqueue_known_job(text, text, text, jsonb, text, timestamptz, integer) is
'The job that has a key, and whether it was enqueued with the same intent.';
