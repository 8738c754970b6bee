create or replace function enqueue(
    p_queue text,
    p_kind text,
    p_payload jsonb,
    p_idempotency_key text,
    p_available_at timestamptz default null,
    p_max_attempts integer default 3
)
returns enqueued_job
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
as $$
declare
    v_caller  text collate "C" := _caller();
    v_now     timestamptz := clock_timestamp();
    v_fault   text;
    v_answer  enqueued_job;
    v_is_same boolean;
begin
    if _is_plainly_sound(
        p_kind, p_payload, p_idempotency_key, p_available_at, p_max_attempts
    ) is not true then
        perform _require_producer();
        v_fault := _job_fault(
            p_queue, p_kind, p_payload,
            p_idempotency_key, p_available_at, p_max_attempts
        );
    end if;

    loop
        -- The insert itself proves caller and queue: nearly every call needs to ask no
        -- more. What refused it is found out only afterwards.
        if v_fault is null then
            insert into job (
                job_id, created_at, available_at, max_attempts,
                producer, queue, kind, idempotency_key, payload
            )
            select
                _new_job_id(v_now), v_now, p_available_at, p_max_attempts,
                v_caller, p_queue, p_kind, p_idempotency_key, p_payload
            from instance as i
            where
                v_caller = any (i.producers)
                and p_queue collate "C" = any (i.queues)
            on conflict (producer, idempotency_key) do nothing
            returning job_id, true into v_answer;
        end if;
        if v_answer.created then
            insert into live_job (job_id, available_at, attempt, max_attempts, queue)
            values (
                v_answer.job_id, greatest(p_available_at, v_now), 0, p_max_attempts,
                p_queue
            );
            if _is_awaited(p_queue) then
                perform _wake(p_queue);
            end if;
            return v_answer;
        end if;

        perform _require_producer();
        if not exists (
            select from instance as i where p_queue collate "C" = any (i.queues)
        ) then
            v_fault := coalesce(
                v_fault,
                _job_fault(
                    p_queue, p_kind, p_payload,
                    p_idempotency_key, p_available_at, p_max_attempts
                ),
                format('queue %s is not declared', p_queue)
            );
        end if;
        if v_fault is not null then
            raise exception using errcode = 'LJ001', message = v_fault;
        end if;

        -- The insert may have waited for a commit that its snapshot does not show; this
        -- one does. A purge may take the row in between: then once more. To an old
        -- snapshot a purged row may show beside this transaction's own, the newest.
        -- Behind the fence only the key's own index serves.
        select
            j.job_id,
            (j.queue, j.kind, j.payload, j.max_attempts)
            = (
                p_queue collate "C", p_kind collate "C", p_payload, p_max_attempts
            )
            and j.available_at is not distinct from p_available_at
        into v_answer.job_id, v_is_same
        from (
            select i.*
            from job as i
            where
                i.producer = v_caller
                and i.idempotency_key = p_idempotency_key collate "C"
            offset 0
        ) as j
        order by j.job_id desc
        limit 1;
        exit when found;
    end loop;

    if not v_is_same then
        raise exception using
            errcode = 'LJ002',
            message = 'idempotency_key was used for another intent',
            hint    = 'Repeat the first intent unchanged, or choose a new key.';
    end if;
    v_answer.created := false;
    return v_answer;
end;
$$;
comment on function enqueue(text, text, jsonb, text, timestamptz, integer) is
'Makes a job durable and says whether this call created it: the same key with the same '
'intent answers with the first job. Refuses an undeclared caller (42501), an argument '
'out of bounds or an undeclared queue (LJ001), a key used for another intent (LJ002).';
