-- A NOTIFY makes the commit take a lock across the whole server, so one is sent only
-- while somebody waits: a waiter holds the queue's key shared, and where nobody does
-- this session gets it for a moment. Two producers that ask at once may each find the
-- other; that costs one notification.
create or replace function _queue_is_awaited(p_queue text)
returns boolean
language sql volatile as $$
    select case
        when pg_try_advisory_lock(_queue_key(p_queue))
            then not pg_advisory_unlock(_queue_key(p_queue))
        else true
    end
$$;
comment on function _queue_is_awaited(text) is
'Whether a session holds the advisory lock of a queue, as a waiting worker does.';
