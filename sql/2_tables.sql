-- The map. A job is three facts with three lifetimes.
--
--   job        what a producer asked for. Written once by enqueue, never changed,
--              deleted by purge; redrive rewrites it as it is, for a lock.
--   live_job   a job that has not ended. The only rows that are updated, and as few of
--              them as there are jobs still to do.
--   attempt    what became of each attempt. Written once, as the attempt ends, never
--              changed, deleted with its job.
--
-- Status is derived, never stored:
--
--   live_job row without a lease    queued     (due, scheduled or waiting for a retry)
--   live_job row with a lease       running    (also while it has lapsed unreclaimed)
--   no live_job row                 succeeded or failed, by the last attempt
--
--   enqueue -> queued -> claim -> running -> complete            -> succeeded
--                 ^                       -> fail, final         -> failed
--                 +----- fail, retryable -+
--                 +----- release ---------+
--                 ^                       -> lease lapses -> the next claim takes it
--                 +--------- redrive ------- failed
--
-- live_job.attempt counts claims, never goes down, and is the fencing token.
--
-- Lock order: job before live_job, live_job rows by job_id. The worker's verbs lock
-- live_job rows alone, and only those whose owner and token match; enqueue locks
-- nothing that exists; redrive and purge lock the job row first.
--
-- No foreign keys: each would cost the hot path a lookup and a lock on the row it
-- points to. A job's rows are written and deleted together by the functions, and
-- nobody else may write.
--
-- 4_internal by the first word of a name:
--
--   claim      which jobs may be claimed, where claims begin, leases that ran out
--   enqueue    what is wrong with a job, its id, and the job that has its key
--   lease      tokens, evidence, the end of an attempt, half a lease
--   redrive    how failed jobs are queued again
--   queue      its wake-ups, first due jobs, last ends, and the name that was meant
--   policy     the row of instance, kept and complete
--   document   the configuration document: its faults, and what is stored of it
--   session    who is connected, waits or holds locks, and begins with which settings
--   catalogue  the objects and rights that there are, those there should be, the digest
--   health     one function for each part of inspect_health
--   explain    one function for each step of explain_job
--   require    what several verbs refuse
--   others     callers, names, the status
--
-- Text is compared by the "C" collation: faster, and an upgrade of the C library
-- cannot corrupt an index.

create table if not exists instance (
    is_only            boolean          not null default true,
    lease_seconds      integer          not null,
    retry_base_seconds integer          not null,
    retry_max_seconds  integer          not null,
    retry_jitter       double precision not null default 0,
    notify             boolean          not null default true,
    retention_seconds  bigint,
    configured_at      timestamptz      not null default clock_timestamp(),
    queues             text[]           not null default '{}' collate "C",
    producers          text[]           not null default '{}' collate "C",
    workers            text[]           not null default '{}' collate "C",
    paused             text[]           not null default '{}' collate "C",
    floors             regclass[]       not null default '{}',

    constraint instance_pkey primary key (is_only),
    constraint instance_is_one_row check (is_only),
    constraint instance_lease_seconds_in_range check (lease_seconds between 1 and 3600),
    constraint instance_retry_base_seconds_in_range
        check (retry_base_seconds between 1 and 86400),
    constraint instance_retry_max_seconds_in_range
        check (retry_max_seconds between 1 and 86400),
    constraint instance_retry_base_is_not_above_max
        check (retry_base_seconds <= retry_max_seconds),
    constraint instance_retry_jitter_in_range check (retry_jitter between 0 and 1),
    constraint instance_retention_seconds_in_range
        check (retention_seconds between 1 and 3155760000)
);
comment on table instance is
'The policy of this Jobs Instance, one row, written by configure.';
comment on column instance.is_only is 'Always true: the key admits one row.';
comment on column instance.lease_seconds is 'How long a claim or a renewal holds.';
comment on column instance.retry_base_seconds is
'The wait after a first failure; it doubles with each further one.';
comment on column instance.retry_max_seconds is 'No wait between attempts is longer.';
comment on column instance.retry_jitter is
'The share of a wait, from 0 to 1, that chance may take off it.';
comment on column instance.queues is
'The names in queue. Triggers copy them here, with the callers, so that enqueue and '
'claim read one row.';
comment on column instance.floors is
'The sequences of queue.floor, three for each of queues, in the same order.';
comment on column instance.producers is 'The names in caller that are producers.';
comment on column instance.workers is 'The names in caller that are workers.';
comment on column instance.paused is 'The names in queue that are paused.';
comment on column instance.notify is
'Whether a new or returned job wakes the workers that wait for its queue.';
comment on column instance.retention_seconds is
'How long enforce_retention keeps ended jobs; NULL: for ever.';

create table if not exists queue (
    queue     text       collate "C" not null,
    floor     regclass[],
    paused_at timestamptz,
    paused_by text       collate "C",

    constraint queue_pkey primary key (queue),
    constraint queue_name_is_plain
        check (length(queue) <= 128 and queue ~ '^[A-Za-z0-9._:/-]+$')
);
comment on table queue is
'The declared queues, written by configure; pause and resume write when and by whom.';
comment on column queue.floor is
'The three sequences of the queue''s claim floor: the due time behind which claims '
'begin, in microseconds, the first 60 bits of the job id there, and the last full '
'scan. NULL: each claim scans from the beginning.';

create table if not exists caller (
    caller      text collate "C" not null,
    is_producer boolean          not null,
    is_worker   boolean          not null,
    is_observer boolean          not null,

    constraint caller_pkey primary key (caller),
    -- In the form that a dump gives it, so that a restored Instance compares equal.
    constraint caller_is_a_role_name check (
        octet_length(caller) >= 1 and octet_length(caller) <= 63
        and lower(caller) <> all (array['none', 'public'])
        and left(lower(caller), 3) <> 'pg_'
    ),
    constraint caller_is_declared_for_something
        check (is_producer or is_worker or is_observer)
);
comment on table caller is
'The declared caller Instances, each a role, by name; written by configure.';

create table if not exists job (
    job_id          uuid             not null,
    created_at      timestamptz      not null,
    available_at    instant,
    max_attempts    asked_attempts   not null,
    producer        text collate "C" not null,
    queue           text collate "C" not null,
    kind            text collate "C" not null,
    idempotency_key text collate "C" not null,
    payload         object_payload   not null,

    constraint job_pkey primary key (job_id),
    -- The key first: a search for it then compares few producers.
    constraint job_producer_idempotency_key_key unique (idempotency_key, producer)
) with (
    -- The table grows for years and its rows hardly change. So each vacuum freezes what
    -- it reads, and what it skips later needs no vacuum against wraparound.
    autovacuum_freeze_min_age = 0,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0
);
comment on table job is 'What producers asked for: the immutable intent of each job.';
comment on column job.job_id is
'Time-ordered (UUID version 7, sub-millisecond bits): order of enqueueing.';
comment on column job.available_at is 'As asked; NULL: at once.';
comment on column job.max_attempts is 'As asked; redrive and release grant more.';
comment on column job.producer is 'The caller Instance that enqueued the job.';
comment on column job.idempotency_key is
'Unique within its producer, until the job is purged.';
comment on column job.payload is 'Owned and understood by the business module alone.';
-- lz4 stores a payload of 4 kB in a quarter of pglz's time, and reads it in half, in as
-- many bytes. Not every server is built with it.
do $$
begin
    if exists (
        select
        from pg_settings as s
        where s.name = 'default_toast_compression' and 'lz4' = any (s.enumvals)
    ) and exists (
        select
        from pg_attribute as a
        where a.attrelid = 'job'::regclass
            and a.attname = 'payload'
            and a.attcompression <> 'l'
    ) then
        alter table job alter column payload set compression lz4;
    end if;
end $$;

create table if not exists live_job (
    job_id            uuid             not null,
    available_at      instant          not null,
    leased_at         instant,
    lease_expires_at  instant,
    attempt           integer          not null,
    max_attempts      integer          not null,
    payload_bytes     integer,
    queue             text collate "C" not null,
    lease_owner       text collate "C",
    lease_token_hash  bytea,
    last_failure_code text collate "C",
    holder            text collate "C",

    -- The functions keep the four fields of a lease all set or all NULL, and attempt
    -- between 0 and max_attempts. A CHECK would cost every enqueue and claim a tenth of
    -- their own time. A row broken by hand is ended, or claimed anew, and stops nobody.
    constraint live_job_pkey primary key (job_id)
) with (
    -- A row grows by its lease when first claimed and is updated in place: the claim
    -- touches no indexed column, so while the page has room no index is written.
    -- Of 10,000 claims, 500 at a time, by a session with a name of 33 characters, all
    -- stayed in pages filled to 32 %; without a name six of ten did in pages filled to
    -- 50 %, and the others cost half as much again.
    fillfactor = 32,
    -- Every job leaves a few dead rows behind in minutes, so the table is vacuumed by
    -- their number, not by its size, and at full speed.
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 20000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.2,
    autovacuum_analyze_threshold = 5000,
    -- Truncation would take an exclusive lock to give back pages that the next burst
    -- of jobs needs again.
    vacuum_truncate = off
);
comment on table live_job is
'The jobs that have not ended: queued while without a lease, running with one.';
comment on column live_job.available_at is
'Not claimed before; moved by a retry. Never before the job was enqueued.';
comment on column live_job.attempt is
'How often the job was claimed. It never goes down: the fencing token.';
comment on column live_job.max_attempts is
'The attempts granted: as asked, and more by redrive and release.';
comment on column live_job.payload_bytes is
'The size of the payload: a claim bounds what it returns. NULL is not counted.';
comment on column live_job.lease_owner is 'The caller Instance that holds the lease.';
comment on column live_job.holder is
'The application_name of the session that claimed, to find its process; NULL: none.';
comment on column live_job.lease_token_hash is
'SHA-256 of the lease token, which is stored nowhere.';
comment on column live_job.last_failure_code is
'The code that the latest failed attempt reported.';

-- claim scans this in order; next_available_at reads its first entries. The condition
-- always holds, and only a query that names a queue can prove it: a lookup by job_id,
-- planned while the table was empty, could scan all of this.
create index if not exists live_job_claimable_idx
on live_job (queue, available_at, job_id)
where queue is not null;

create table if not exists attempt (
    job_id           uuid             not null,
    leased_at        timestamptz      not null,
    ended_at         timestamptz      not null,
    retry_at         timestamptz,
    attempt          integer          not null,
    max_attempts     integer          not null,
    retryable        boolean,
    queue            text collate "C" not null,
    worker           text collate "C" not null,
    outcome          attempt_outcome  not null,
    failure_code     text collate "C",
    lease_token_hash bytea            not null,
    holder           text collate "C",

    constraint attempt_pkey primary key (job_id, attempt)
) with (
    -- As for job.
    autovacuum_freeze_min_age = 0,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0
);
comment on table attempt is
'The evidence: one row for each attempt that has ended. Rows are never changed.';
comment on column attempt.attempt is 'The fencing token, from 1.';
comment on column attempt.ended_at is
'When the end was recorded; for lease_expired, by the claim that found it.';
comment on column attempt.retry_at is 'When a retried or released job falls due again.';
comment on column attempt.max_attempts is 'The attempts granted at that time.';
comment on column attempt.retryable is
'What the worker said of its failure; NULL where it reported none.';
comment on column attempt.queue is
'The job''s queue, so that an index finds the failures of one queue.';
comment on column attempt.worker is 'The caller Instance that held the lease.';
comment on column attempt.holder is
'The application_name of the session that claimed.';
comment on column attempt.failure_code is
'What the worker reported, or attempts_exhausted for a last lease that ran out.';
comment on column attempt.lease_token_hash is
'SHA-256 of the lease token: a repeated verb finds what it returned at first.';

-- For purge, oldest end first: attempts that another followed would be in its way.
create index if not exists attempt_ended_at_idx on attempt (ended_at)
where outcome in ('succeeded', 'failed') or failure_code = 'attempts_exhausted';

-- A search for failures must not scan successes, nor the failures of other queues.
create index if not exists attempt_failed_idx on attempt (ended_at, job_id)
where outcome = 'failed' or failure_code = 'attempts_exhausted';
create index if not exists attempt_failed_of_queue_idx
on attempt (queue, ended_at, job_id)
where outcome = 'failed' or failure_code = 'attempts_exhausted';

create table if not exists operator_act (
    operator_act_id bigint           not null generated always as identity,
    acted_at        timestamptz      not null default clock_timestamp(),
    operator        text collate "C" not null,
    act             text collate "C" not null,
    arguments       jsonb            not null,
    job_count       integer          not null,
    login           text collate "C" default session_user,

    constraint operator_act_pkey primary key (operator_act_id)
);
comment on table operator_act is
'The audit: one row for each operator act that changed something.';
comment on column operator_act.operator is 'The role that acted: by SET ROLE, a group.';
comment on column operator_act.login is 'The role that had logged in.';

create table if not exists installed_digest (
    is_only     boolean     not null default true,
    digest      text        collate "C",
    stored_at   timestamptz not null default clock_timestamp(),
    fingerprint text        collate "C",

    constraint installed_digest_pkey primary key (is_only),
    constraint installed_digest_is_one_row check (is_only)
);
comment on table installed_digest is
'One row: the digest of the objects when they were last known to be as the release has '
'them. inspect_health compares with it.';
comment on column installed_digest.is_only is 'Always true: the key admits one row.';
comment on column installed_digest.digest is
'NULL: the last migration met objects that differed from what was installed.';
comment on column installed_digest.fingerprint is
'What _catalogue_fingerprint returned when nothing was wrong with objects and rights. '
'While it returns the same, inspect_health does not look at them.';
