create or replace function enqueue(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz default null, p_max_attempts integer default 3
)
returns enqueued_job
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
    v_caller text collate "C" := _caller();
    v_fault  text             := _enqueue_fault(
        p_queue, p_kind, p_payload, p_idempotency_key, p_available_at, p_max_attempts
    );
    v_answer enqueued_job;
begin
    loop
        -- The insert itself proves caller and queue: nearly every call asks nothing
        -- else. One statement takes the locks on both tables before it reads the clock.
        if v_fault is null then
            with fresh as (
                insert into job (
                    job_id, created_at, available_at, max_attempts,
                    producer, queue, kind, idempotency_key, payload
                )
                select _enqueue_job_id(c.now), c.now, p_available_at, p_max_attempts,
                    v_caller, p_queue, p_kind, p_idempotency_key, p_payload
                from (
                    select clock_timestamp() as now
                    from instance as i
                    where v_caller = any (i.producers)
                        and p_queue collate "C" = any (i.queues)
                    offset 0
                ) as c
                on conflict (producer, idempotency_key) do nothing
                returning job_id, created_at
            )
            insert into live_job (
                job_id, available_at, attempt, max_attempts, payload_bytes, queue
            )
            select f.job_id, greatest(p_available_at, f.created_at), 0, p_max_attempts,
                pg_column_size(p_payload), p_queue
            from fresh as f
            returning job_id, true into v_answer;
        end if;
        if v_answer.created then
            if _queue_is_awaited(p_queue) then
                perform _queue_wake(p_queue);
            end if;
            return v_answer;
        end if;

        v_answer := _enqueue_again(
            p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
            p_max_attempts, v_fault
        );
        exit when v_answer.job_id is not null;
    end loop;
    return v_answer;
end;
$$;
comment on function enqueue(text, text, jsonb, text, timestamptz, integer) is
'Makes a job durable. Returns the job and whether this call created it: the same key '
'with the same intent returns the first job. Refuses an undeclared caller (42501), an '
'argument out of bounds or an undeclared queue (LJ001), a key used for another intent '
'(LJ002, with the job_id that has the key in DETAIL), and every call while no policy '
'is stored (LJ008).';
