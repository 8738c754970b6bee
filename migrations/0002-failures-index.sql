-- depends: 0001-initial
-- transactional: false
-- A walk over all the evidence must not keep a worker from recording the end of an
-- attempt, so this index is built while they go on, which PostgreSQL does only outside
-- a transaction. Whatever an earlier run left behind is made anew: it may be broken.
--
-- Nobody but another DDL or a vacuum waits behind what is done concurrently, so it may
-- wait for all the older snapshots in the database, whosever they are.
set lock_timeout = '1h';

drop index concurrently if exists attempt_failed_idx;

-- Where nothing has ended yet it is made at once: the other way waits for every
-- transaction in the database that is older. Workers would wait behind this one.
set lock_timeout = '5s';

do $$
begin
    if not exists (select from attempt) then
        create index if not exists attempt_failed_idx on attempt (ended_at, job_id)
        where outcome = 'failed' or failure_code = 'attempts_exhausted';
    end if;
end $$;

set lock_timeout = '1h';

-- squawk-ignore ban-concurrent-index-creation-in-transaction
create index concurrently if not exists attempt_failed_idx
on attempt (ended_at, job_id)
where outcome = 'failed' or failure_code = 'attempts_exhausted';
