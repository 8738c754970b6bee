-- A typing error leaves all but two characters as they were, from the front or from the
-- back. Declared producers and workers see a name, and roles that may list them all.
create or replace function _queue_hint(p_queue text)
returns text language sql stable as $$
    select coalesce(
        (
            select format('Did you mean %s?', q.queue)
            from queue as q
            cross join lateral (
                select
                    max(n) filter (
                        where lower(left(q.queue, n))
                            = lower(left(p_queue, n) collate "C")
                    )
                    + max(n) filter (
                        where lower(right(q.queue, n))
                            = lower(right(p_queue, n) collate "C")
                    ) as characters
                from generate_series(0, length(q.queue)) as n
            ) as same
            where same.characters > 0
                and same.characters >= greatest(length(q.queue), length(p_queue)) - 2
                and (
                    has_function_privilege(
                        to_regrole(quote_ident(_caller())),
                        to_regprocedure('inspect_queues()'), 'EXECUTE'
                    )
                    or exists (
                        select from caller as c
                        where c.caller = _caller() and (c.is_producer or c.is_worker)
                    )
                )
            order by greatest(length(q.queue), length(p_queue)) - same.characters,
                q.queue
            limit 1
        ),
        'Name a queue that the configuration declares.'
    )
$$;
comment on function _queue_hint(text) is
'What to do about a queue that is not declared: the declared queue with nearly the '
'same name, if there is one.';
