create or replace function _enqueue_again(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer, p_fault text
)
returns enqueued_job
language plpgsql stable
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
as $$
declare
    v_is_declared boolean;
    v_fault       text;
    v_known       record;
begin
    perform _require_producer();
    v_is_declared := exists (
        select from instance as i where p_queue collate "C" = any (i.queues)
    );
    v_fault := coalesce(
        p_fault,
        case when not v_is_declared then _enqueue_fault_in_full(
            p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
            p_max_attempts
        ) end
    );
    if v_fault is not null then
        raise exception using errcode = 'LJ001', message = v_fault;
    end if;
    if not v_is_declared then
        raise exception using errcode = 'LJ001',
            message = format('queue %s is not declared', p_queue),
            hint    = _queue_hint(p_queue);
    end if;

    -- The insert may have waited for a commit that its snapshot does not show; that of
    -- this call does. A purge may have taken the row since.
    select k.job_id, k.is_same into v_known
    from _enqueue_known_job(
        _caller(), p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
        p_max_attempts
    ) as k;
    if not v_known.is_same then
        raise exception using errcode = 'LJ002',
            message = 'idempotency_key was used for another intent',
            detail  = format('job_id=%s', v_known.job_id),
            hint    = 'Repeat the first intent unchanged, or choose a new key.';
    end if;
    return (v_known.job_id, false);
end;
$$;
comment on function
_enqueue_again(text, text, jsonb, text, timestamptz, integer, text) is
'What enqueue returns where its insert made no job: the job that has the key, or NULL '
'if it was just purged. Refuses what enqueue refuses.';
