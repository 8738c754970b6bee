-- Up to 64 MB are read whole, which is a quarter of a million live jobs.
create or replace function _queue_share_to_read()
returns real
language sql volatile as $$
    select least(100, 6710886400 / greatest(1, pg_relation_size('live_job'::regclass)))
        ::real
$$;
comment on function _queue_share_to_read() is
'What percentage of the pages of live_job a count reads.';
