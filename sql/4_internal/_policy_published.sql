create or replace function _policy_published()
returns trigger
language plpgsql
set search_path from current as $$
begin
    update instance
    set
        queues = array(select q.queue from queue as q order by q.queue),
        floors = array(
            select q.floor[n.n]
            from queue as q
            cross join generate_series(1, 3) as n (n)
            order by q.queue, n.n
        ),
        paused = array(
            select q.queue from queue as q where q.paused_at is not null
        ),
        producers = array(select c.caller from caller as c where c.is_producer),
        workers = array(select c.caller from caller as c where c.is_worker);
    return null;
end;
$$;
comment on function _policy_published() is
'Copies the declared queues and callers into the row that enqueue and claim read.';

create or replace trigger queue_is_published
after insert or update or delete or truncate on queue
for each statement execute function _policy_published();

create or replace trigger caller_is_published
after insert or update or delete or truncate on caller
for each statement execute function _policy_published();

-- A row made anew finds what is declared already.
create or replace trigger instance_is_published
after insert on instance
for each statement execute function _policy_published();
