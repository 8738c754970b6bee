-- Any role may hold a queue's key and so make each enqueue notify, which costs the
-- commit a lock across the whole server. So a session that has notified a queue is
-- silent for 20 ms: a waiting worker that was woken looks again after 20, 50 and 100 ms
-- anyway. The setting rolls back with its transaction. A forged one silences only its
-- own session. PL/pgSQL keeps the plan; a function in SQL would be planned by every
-- call.
create or replace function _queue_wake(p_queue text)
returns void
language plpgsql volatile as $$
declare
    v_setting text   := 'lenso_jobs.woke_' || to_hex(_queue_key(p_queue));
    v_woke_us text   := current_setting(v_setting, true);
    v_now_us  bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
begin
    if v_woke_us collate "C" ~ '^[0-9]+$' and length(v_woke_us) <= 16 then
        if v_now_us - v_woke_us::bigint between 0 and 19999 then
            return;
        end if;
    end if;

    perform
        pg_notify(current_schema(), p_queue),
        set_config(v_setting, v_now_us::text, false)
    from instance as i
    where i.notify and p_queue collate "C" <> all (i.paused);
end;
$$;
comment on function _queue_wake(text) is
'Notifies the sessions that wait for a queue, on the channel named as the schema, '
'unless this session did so within the last 20 ms, or the queue is paused.';
