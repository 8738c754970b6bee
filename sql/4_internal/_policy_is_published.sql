-- Logical replication, and a dump of the rows alone, fire no trigger.
create or replace function _policy_is_published()
returns boolean language sql stable as $$
    select not exists (
        select
        from instance as i
        where array(select unnest(i.queues) order by 1)
            <> array(select q.queue from queue as q order by 1)
            or array(select unnest(i.paused) order by 1) <> array(
                select q.queue from queue as q where q.paused_at is not null order by 1
            )
            or array(select unnest(i.producers) order by 1)
            <> array(select c.caller from caller as c where c.is_producer order by 1)
            or array(select unnest(i.workers) order by 1)
            <> array(select c.caller from caller as c where c.is_worker order by 1)
    )
$$;
comment on function _policy_is_published() is
'Whether the row of instance repeats the tables queue and caller.';
