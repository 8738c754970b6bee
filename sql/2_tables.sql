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

    constraint instance_pkey primary key (is_only),
    constraint instance_is_one_row check (is_only),
    constraint instance_lease_seconds_in_range
        check (lease_seconds between 1 and 3600),
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
comment on column instance.is_only is 'Always true: the key that admits one row.';
comment on column instance.lease_seconds is 'How long a claim or a renewal holds.';
comment on column instance.retry_base_seconds is
'The wait after a first failure; it doubles with each further one.';
comment on column instance.retry_max_seconds is 'No wait between attempts is longer.';
comment on column instance.retry_jitter is
'The share of a wait, from 0 to 1, that chance may take off it.';
comment on column instance.queues is
'The names in queue. Copied here with the callers, by triggers, because enqueue and '
'claim run for every job: one row of one table tells them what three would.';
comment on column instance.producers is 'The names in caller that are producers.';
comment on column instance.workers is 'The names in caller that are workers.';
comment on column instance.notify is
'Whether a job that falls to a queue wakes the workers that wait for it.';
comment on column instance.retention_seconds is
'How long enforce_retention keeps ended jobs; NULL: for ever. Nothing is purged unless '
'somebody calls it, or purge.';

create table if not exists queue (
    queue text collate "C" not null,

    constraint queue_pkey primary key (queue),
    constraint queue_name_is_plain
        check (length(queue) <= 128 and queue ~ '^[A-Za-z0-9._:/-]+$')
);
comment on table queue is 'The declared queues, written by configure.';

create table if not exists caller (
    caller      text collate "C" not null,
    is_producer boolean          not null,
    is_worker   boolean          not null,
    is_observer boolean          not null,

    constraint caller_pkey primary key (caller),
    -- In the form that a dump gives it, so that a restored Instance compares equal.
    constraint caller_is_a_role_name check (
        octet_length(caller) >= 1
        and octet_length(caller) <= 63
        and lower(caller) <> all (array['none', 'public'])
        and left(lower(caller), 3) <> 'pg_'
    ),
    constraint caller_is_declared_for_something
        check (is_producer or is_worker or is_observer)
);
comment on table caller is
'The declared caller Instances, each a role, written by configure. Names are text, so '
'that a dump restored elsewhere keeps its meaning.';

create table if not exists job (
    job_id          uuid             not null,
    created_at      instant          not null,
    available_at    instant,
    max_attempts    asked_attempts   not null,
    producer        text collate "C" not null,
    queue           text collate "C" not null,
    kind            text collate "C" not null,
    idempotency_key text collate "C" not null,
    payload         object_payload      not null,

    constraint job_pkey primary key (job_id),
    constraint job_producer_idempotency_key_key unique (producer, idempotency_key)
);
comment on table job is 'What producers asked for: the immutable intent of each job.';
comment on column job.job_id is
'Time-ordered (UUID version 7, sub-millisecond bits): order of enqueueing.';
comment on column job.available_at is 'As asked; NULL: at once.';
comment on column job.max_attempts is 'As asked; redrive may grant a job more.';
comment on column job.producer is 'The caller Instance that enqueued the job.';
comment on column job.idempotency_key is
'Unique within its producer, until the job is purged.';
comment on column job.payload is 'Owned and understood by the business module alone.';

create table if not exists live_job (
    job_id            uuid             not null,
    available_at      instant          not null,
    leased_at         instant,
    lease_expires_at  instant,
    attempt           integer          not null,
    max_attempts      integer          not null,
    queue             text collate "C" not null,
    lease_owner       text collate "C",
    lease_token_hash  bytea,
    last_failure_code text collate "C",

    constraint live_job_pkey primary key (job_id),
    -- That the four fields of a lease are all set or none is kept by the functions and
    -- not by a CHECK, which cost every enqueue and claim a tenth of their own time. A
    -- lease broken by hand is passed over or given anew, and stops nobody.
    constraint live_job_attempt_is_within_max_attempts
        check (attempt between 0 and max_attempts)
) with (
    -- A row grows by its lease when first claimed and is updated in place: the claim
    -- touches no indexed column, so while the page has room no index is written.
    -- Of 10,000 claims, 500 at a time, all stayed in pages filled to 35 %, and six of
    -- ten in pages filled to 50 %; the others cost half as much again.
    fillfactor = 35,
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
'The attempts granted: as asked, and more by redrive.';
comment on column live_job.lease_owner is 'The caller Instance that holds the lease.';
comment on column live_job.lease_token_hash is
'SHA-256 of the lease token; the token itself is nowhere in the database.';
comment on column live_job.last_failure_code is
'The code that the latest failed attempt reported.';

-- claim walks this in order; next_available_at reads its first entries. The condition
-- always holds, and only a query that names a queue can prove it: a lookup by job_id,
-- planned while the table was empty, would as soon walk this as descend its own index.
create index if not exists live_job_claimable_idx
on live_job (queue, available_at, job_id)
where queue is not null;

create table if not exists attempt (
    job_id           uuid             not null,
    leased_at        instant          not null,
    ended_at         instant          not null,
    retry_at         instant,
    attempt          integer          not null,
    max_attempts     integer          not null,
    retryable        boolean,
    worker           text collate "C" not null,
    outcome          attempt_outcome  not null,
    failure_code     text collate "C",
    lease_token_hash bytea            not null,

    constraint attempt_pkey primary key (job_id, attempt)
);
comment on table attempt is
'The evidence: one row for each attempt that has ended. Rows are never changed.';
comment on column attempt.attempt is 'The fencing token of the attempt, from 1.';
comment on column attempt.ended_at is
'When the end was recorded; for lease_expired, by the claim that found it.';
comment on column attempt.retry_at is 'When a retried job falls due again.';
comment on column attempt.max_attempts is 'The attempts granted at that time.';
comment on column attempt.retryable is
'What the worker said of its failure; NULL where it reported none.';
comment on column attempt.worker is 'The caller Instance that held the lease.';
comment on column attempt.failure_code is
'What the worker reported, or attempts_exhausted for a last lease that ran out.';
comment on column attempt.lease_token_hash is
'SHA-256 of the lease token: lets a repeated complete or fail answer as at first.';

-- purge walks the oldest ends of jobs first; attempts that were followed by another
-- would be in its way by the million.
create index if not exists attempt_ended_at_idx on attempt (ended_at)
where outcome in ('succeeded', 'failed') or failure_code = 'attempts_exhausted';

-- Whoever asks what failed must not walk what succeeded.
create index if not exists attempt_failed_idx on attempt (ended_at, job_id)
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
'The audit: who did which operator act, when, with what arguments, on how many jobs.';
comment on column operator_act.operator is 'The role that acted: by SET ROLE, a group.';
comment on column operator_act.login is
'The role that had logged in; NULL for acts of before it was kept.';

create table if not exists installed_object (
    kind   text collate "C" not null,
    name   text collate "C" not null,
    digest text collate "C" not null,

    constraint installed_object_pkey primary key (kind, name)
);
comment on table installed_object is
'What the last migration left behind, for inspect_health to compare with: functions, '
'triggers and views with a digest, indexes, constraints, and the grants of the groups.';
