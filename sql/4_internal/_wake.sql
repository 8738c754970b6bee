create or replace function _wake(p_queue text)
returns void
language sql
volatile
as $$
    select pg_notify(current_schema(), p_queue) from instance as i where i.notify
$$;
comment on function _wake(text) is
'Notifies the sessions that wait for a queue, on the channel named as the schema.';
