-- depends: 0001-initial
-- transactional: false
-- Built while workers go on, which PostgreSQL does only outside of a transaction. An
-- index that an interrupted run left behind may be invalid, so it is dropped first.
-- Only another DDL statement or a vacuum waits behind a concurrent build, so the build
-- may wait for every older snapshot in the database.
set lock_timeout = '1h';

drop index concurrently if exists attempt_worker_idx;

-- On an empty table a plain build is instant. A concurrent one would wait for every
-- older transaction in the database.
set lock_timeout = '5s';

do $$
begin
    if not exists (select from attempt) then
        create index if not exists attempt_worker_idx on attempt (worker, ended_at);
    end if;
end $$;

set lock_timeout = '1h';

-- squawk-ignore ban-concurrent-index-creation-in-transaction
create index concurrently if not exists attempt_worker_idx
on attempt (worker, ended_at);
