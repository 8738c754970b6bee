create or replace function _publish_declarations()
returns trigger
language plpgsql
set search_path from current
as $$
begin
    update instance
    set
        queues = array(select q.queue from queue as q),
        producers = array(select c.caller from caller as c where c.is_producer),
        workers = array(select c.caller from caller as c where c.is_worker);
    return null;
end;
$$;
comment on function _publish_declarations() is
'Copies the declared queues and callers into the row that enqueue and claim read.';

create or replace trigger queue_is_published
after insert or update or delete or truncate on queue
for each statement execute function _publish_declarations();

create or replace trigger caller_is_published
after insert or update or delete or truncate on caller
for each statement execute function _publish_declarations();

-- A row made anew finds what is declared already.
create or replace trigger instance_is_published
after insert on instance
for each statement execute function _publish_declarations();
