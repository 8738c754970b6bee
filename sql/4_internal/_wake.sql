-- PL/pgSQL keeps the plan; a function in SQL would be planned by every call.
create or replace function _wake(p_queue text)
returns void
language plpgsql
volatile
as $$
begin
    perform pg_notify(current_schema(), p_queue) from instance as i where i.notify;
end;
$$;
comment on function _wake(text) is
'Notifies the sessions that wait for a queue, on the channel named as the schema.';
