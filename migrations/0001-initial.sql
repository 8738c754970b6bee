-- Every migration opens with these two statements, and they name no Instance: the
-- schema is the one the connection's search_path selects, its owner the role that
-- bootstrap.sql made, and from here on everything is made by that role in that schema.
set local lock_timeout = '5s';

do $$
declare
    v_schema text    := current_schema();
    v_sound  boolean := true;
    v_owner  text    := (
        select pg_get_userbyid(n.nspowner)
        from pg_namespace as n
        where n.nspname = current_schema()
    );
begin
    -- What a connection that names no Instance has in its search_path is not to be
    -- trusted with a function call.
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Outside a transaction the first statement, and all that is set below, is
    -- forgotten at once, and the rest would be made by the connected role.
    if current_setting('lock_timeout') <> '5s' then
        raise exception using errcode = 'LJ008',
            message = 'a migration must be applied in one transaction',
            hint    = 'With psql: -1 -v ON_ERROR_STOP=1.';
    end if;

    if (
        select count(*) = 4
        from pg_roles as r
        where right(v_owner, 6) = '_owner'
          and r.rolname in (
              left(v_owner, -6) || '_producer', left(v_owner, -6) || '_worker',
              left(v_owner, -6) || '_observer', left(v_owner, -6) || '_operator'
          )
    ) is not true then
        raise exception using errcode = 'LJ008',
            message = format('schema %s is not a Jobs Instance', v_schema),
            hint    = 'Run sql/bootstrap.sql first, and name the Instance''s schema '
                      'in the URL: ?schema=<schema>.';
    end if;

    -- A second session that applies migrations to this Instance waits here, whether or
    -- not it respects the migration tool's own lock.
    perform pg_advisory_xact_lock(
        hashtextextended('lenso-jobs migration ' || v_schema, 0)
    );
    perform set_config('search_path', format('%I, pg_temp', v_schema), true);
    perform set_config('role', v_owner, true);
    -- Files are loaded by name, and a function may call one that comes later.
    perform set_config('check_function_bodies', 'off', true);

    -- For 9_seal.sql, before anything changes. In an empty schema nothing is unsound.
    begin
        if exists (
            select from pg_class as c
            where c.relnamespace = v_schema::regnamespace
                and c.relname !~ '^_?yoyo_'
        ) then
            v_sound := (select d.digest from installed_digest as d) = _catalogue_digest();
        end if;
    exception when others then
        v_sound := false;
    end;
    perform set_config('lenso_jobs.was_sound', coalesce(v_sound, false)::text, true);
end $$;
-- CREATE TYPE knows no IF NOT EXISTS, and a migration may be applied a second time.
--
-- What must hold of one column of a hot table is a domain's constraint, and only where
-- a caller chooses the value or where it could stop a queue: each costs an insert 2 %.
-- A table's CHECK costs a tenth: every statement that writes a row parses it anew.
do $$
declare
    v_known name[] := array(
        select t.typname from pg_type as t
        where t.typnamespace = current_schema()::regnamespace
    );
begin
    if 'instant' <> all (v_known) then
        create domain instant as timestamptz
            constraint instant_is_finite check (isfinite(value));
    end if;
    if 'asked_attempts' <> all (v_known) then
        create domain asked_attempts as integer
            constraint asked_attempts_in_range check (value between 1 and 100);
    end if;
    if 'object_payload' <> all (v_known) then
        create domain object_payload as jsonb
            constraint object_payload_is_an_object
            check (jsonb_typeof(value) = 'object');
    end if;
    if 'attempt_outcome' <> all (v_known) then
        create domain attempt_outcome as text collate "C"
            constraint attempt_outcome_is_known check (
                value in ('succeeded', 'retried', 'failed', 'lease_expired', 'released')
            );
    end if;

    if 'enqueued_job' <> all (v_known) then
        create type enqueued_job as (job_id uuid, created boolean);
    end if;
    if 'enqueued_item' <> all (v_known) then
        create type enqueued_item as (position integer, job_id uuid, outcome text);
    end if;
    if 'leased_job' <> all (v_known) then
        create type leased_job as (
            job_id uuid, queue text, kind text, payload jsonb,
            attempt integer, max_attempts integer,
            lease_token text, lease_expires_at timestamptz, created_at timestamptz
        );
    end if;
    if 'renewed_item' <> all (v_known) then
        create type renewed_item as (
            position integer, job_id uuid, lease_expires_at timestamptz, outcome text
        );
    end if;
    if 'completed_item' <> all (v_known) then
        create type completed_item as (position integer, job_id uuid, outcome text);
    end if;
    if 'failed_job' <> all (v_known) then
        create type failed_job as (status text, available_at timestamptz);
    end if;
    if 'failed_item' <> all (v_known) then
        create type failed_item as (
            position integer, job_id uuid, outcome text, available_at timestamptz
        );
    end if;

    if 'inspected_job' <> all (v_known) then
        create type inspected_job as (
            job_id uuid, queue text, kind text, status text,
            attempts integer, max_attempts integer,
            available_at timestamptz, lease_expires_at timestamptz,
            last_failure_code text, created_at timestamptz, updated_at timestamptz,
            producer text, worker text, ended_at timestamptz, holder text
        );
    end if;
    if 'inspected_attempt' <> all (v_known) then
        create type inspected_attempt as (
            attempt integer, worker text, outcome text,
            leased_at timestamptz, lease_expires_at timestamptz, ended_at timestamptz,
            failure_code text, retryable boolean, retry_at timestamptz,
            max_attempts integer, holder text
        );
    end if;
    if 'inspected_queue' <> all (v_known) then
        create type inspected_queue as (
            queue text, is_declared boolean, is_estimate boolean,
            ready bigint, scheduled bigint, retry_waiting bigint,
            running bigint, expired bigint,
            oldest_ready_age interval, oldest_lapse_at timestamptz,
            next_due_at timestamptz, last_claimed_at timestamptz,
            counted_since timestamptz, succeeded bigint, failed bigint,
            failure_codes jsonb, workers_waiting integer,
            broken bigint, oldest_leased_at timestamptz, paused_at timestamptz
        );
    end if;
    if 'inspected_worker' <> all (v_known) then
        create type inspected_worker as (
            worker text, is_declared boolean, is_estimate boolean,
            leases bigint, expired bigint,
            oldest_leased_at timestamptz, next_lease_expires_at timestamptz,
            sessions integer, oldest_job_id uuid, oldest_holder text
        );
    end if;
    if 'inspected_failure' <> all (v_known) then
        create type inspected_failure as (
            job_id uuid, queue text, kind text,
            failure_code text, worker text, attempts integer, ended_at timestamptz
        );
    end if;
    if 'inspected_act' <> all (v_known) then
        create type inspected_act as (
            act_id bigint, acted_at timestamptz, operator text,
            act text, arguments jsonb, job_count integer, login text
        );
    end if;
    if 'inspected_finding' <> all (v_known) then
        create type inspected_finding as (
            severity text, finding text, subject text,
            since timestamptz, detail text, remedy text
        );
    end if;
    if 'explained_job' <> all (v_known) then
        create type explained_job as (
            job_id uuid, queue text, reason text,
            since timestamptz, until timestamptz, who text, pid integer,
            attempt integer, max_attempts integer, failure_code text,
            ahead bigint, meaning text, remedy text, detail text
        );
    end if;
end $$;

comment on domain instant is 'A time that is never infinity.';
comment on domain asked_attempts is 'How many attempts a producer may ask for.';
comment on domain object_payload is 'A payload: any JSON object.';
comment on domain attempt_outcome is 'How an attempt ended.';
comment on type enqueued_job is 'The job, and whether this call created it.';
comment on type enqueued_item is
'One item of enqueue_many, by its position from 1: created, existing, conflict or '
'invalid_job; job_id is NULL for the last two.';
comment on type leased_job is
'What claim returns: the job, its attempt (the fencing token), and the lease.';
comment on type renewed_item is
'One item of renew_many, by its position from 1: renewed, invalid_lease or busy.';
comment on type completed_item is
'One item of complete_many, by its position from 1: completed or invalid_lease.';
comment on type failed_job is
'What fail, release and redrive return: queued with the time the job falls due, or '
'failed.';
comment on type failed_item is
'One item of fail_many or release_many, by its position from 1: queued, failed, '
'invalid_lease, invalid_failure (fail_many) or invalid_argument (release_many).';
comment on type inspected_job is
'The durable evidence of one job, without payload or key.';
comment on type inspected_attempt is
'One attempt of a job: running, with its lease''s end, or ended, with its outcome.';
comment on type inspected_queue is
'One queue: how many of its jobs are ready, scheduled (never failed, due later), '
'waiting for a retry, running, or running under a lease that has expired (the oldest '
'at oldest_lapse_at); and how many ended since counted_since. broken counts those with '
'half a lease. The six are scaled up from a sample where is_estimate says so.';
comment on type inspected_worker is
'One worker: the leases it holds, job and holder of the oldest lease, and how many '
'sessions of its role, or of one that may take it, are connected to the database. '
'Leases are scaled up from a sample where is_estimate says so.';
comment on type inspected_failure is
'A job that has failed, with its last failure code and attempt.';
comment on type inspected_act is
'One operator act: who did what, when, with what arguments, on how many jobs. login is '
'the role that had logged in.';
comment on type inspected_finding is
'What is wrong with the Instance: how bad, what, with which object, since when (NULL: '
'not known), and what to do.';
comment on type explained_job is
'Why a job is not being claimed: a reason of explain_reason, and its facts. who and '
'pid are the worker, operator or session that the reason names. ahead counts the due '
'jobs before it, up to 10,000. detail has further facts, one a line.';
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
-- In the form that a dump gives it, so that a restored Instance compares equal.
create or replace view error_code as
select e.sqlstate, e.name, e.meaning
from (values
    ('42501'::text, 'unauthorized'::text,
    'The role may not call this function, or is not a declared caller.'::text),
    ('LJ001', 'invalid_job',
    'An argument of enqueue is out of bounds, or the queue is not declared.'),
    ('LJ002', 'idempotency_conflict',
    'The producer has used this idempotency key for another intent.'),
    ('LJ003', 'invalid_queue', 'The queue is not declared.'),
    ('LJ004', 'invalid_lease',
    'The lease has expired, was superseded, has ended, or never was.'),
    ('LJ005', 'invalid_failure',
    'The failure code, its retryable mark or its wait is malformed.'),
    ('LJ006', 'job_not_found', 'No such job; it may have been purged or erased.'),
    ('LJ007', 'invalid_argument',
    'A limit, cut-off, array or document is out of range.'),
    ('LJ008', 'schema_not_ready',
    'The schema is missing, older or newer than the client, or has drifted.')
) as e (sqlstate, name, meaning);
comment on view error_code is
'Every SQLSTATE that is refused on purpose. Codes are only ever added.';
comment on column error_code.sqlstate is 'What the driver reports.';
comment on column error_code.name is 'The stable name, the same in every language.';

create or replace view installed_version as
select v.version, v.oldest_client
from (values (1, 1)) as v (version, oldest_client);
comment on view installed_version is
'The version of this schema: the number of the last migration that changed it.';
comment on column installed_version.oldest_client is
'The lowest version for which a client may have been made that this schema serves.';
-- The words of explain_job and inspect_health. Both lists only ever grow.
create or replace view explain_reason as
select r.reason, r.meaning, r.remedy
from (values
    ('ready'::text,
    'The job is due. Claims of its queue take the jobs before it first.'::text,
    'Wait, or add workers. A session that had to pass many other rows may overlook the '
    'job for up to 30 seconds.'::text),
    ('queue_silent',
    'The job is due, and no job of its queue was claimed for a minute or more.',
    'Look at the lines that follow, and mend what stops the workers.'),
    ('scheduled',
    'The job is not due yet: its producer asked for a later time, a worker released it '
    'with a delay, or the clock went back.',
    'Wait until then.'),
    ('retry_waiting', 'An attempt has failed, and the next one is not due yet.',
    'Wait until then. The failure code says why.'),
    ('leased', 'A worker holds the lease of the job.',
    'Wait for the worker. A handler that hangs keeps its lease: if it takes too long, '
    'restart that worker. Then the lease ends at the time given.'),
    ('lease_expired', 'The lease ran out, and the next claim may take the job.',
    'Wait for a claim. If leases run out often, find out what ends the workers.'),
    ('attempts_exhausted',
    'The lease of the last attempt ran out. A claim ends the job as failed.',
    'A claim of its queue or retire_expired ends it. Then redrive it, if it is to be '
    'tried again.'),
    ('row_locked', 'A transaction that is still open holds the row of the job.',
    'Have that session commit or roll back, or end it: pg_terminate_backend.'),
    ('table_locked', 'A transaction that is still open has locked a whole table.',
    'Have that session commit or roll back, or end it: pg_terminate_backend.'),
    ('queue_not_declared', 'The queue is not in the document any more.',
    'Declare the queue again: lenso-jobs configure.'),
    ('queue_paused', 'An operator has paused the queue: claims return no job of it.',
    'Resume the queue when its jobs may run again: lenso-jobs resume.'),
    ('instance_damaged', 'Something that the Instance rests on is missing or changed.',
    'lenso-jobs check'),
    ('no_declared_worker', 'The document names no worker.',
    'Name one in worker_instances: lenso-jobs configure.'),
    ('no_worker_connected',
    'No session that may act as a declared worker is connected.',
    'Start workers, and find out why they stopped. Sessions of superusers do not '
    'count.'),
    ('succeeded', 'The job has ended: a worker completed it.', 'Nothing.'),
    ('failed', 'The job has ended: its last attempt failed.',
    'Look at its attempts: lenso-jobs inspect JOB_ID, or inspect_attempts. redrive '
    'queues the job again.'),
    ('evidence_missing',
    'The job is lost: it is not live, and no attempt on record ended it.',
    'Somebody deleted rows by hand. Enqueue the job again under a new key.'),
    ('purged_or_unknown',
    'There is no such job: it was purged or erased, never committed, or never '
    'enqueued here. since is the time in its id, until the end of what was purged, or '
    'when the job was erased.',
    'Look at inspect_acts, and whether the producer committed.')
) as r (reason, meaning, remedy);
comment on view explain_reason is
'Every reason that explain_job gives, what it means and what to do.';

create or replace view health_finding as
select f.finding, f.severity, f.meaning, f.remedy
from (values
    ('not_configured'::text, 'critical'::text,
    'No configuration is stored, so every call is refused.'::text,
    'lenso-jobs configure'::text),
    ('table_locked', 'critical',
    'A transaction has locked a table, and the verbs wait for it.',
    'Have it commit or roll back, or end it: pg_terminate_backend, or ROLLBACK '
    'PREPARED for a prepared transaction.'),
    ('queue_silent', 'critical',
    'Jobs have been due for a minute or more, and none was claimed since.',
    'Start workers, or find out why they do not claim: lenso-jobs explain with the id '
    'of the job says more.'),
    ('queue_behind', 'warning',
    'Jobs wait for ten minutes or more, though workers are claiming.',
    'Add workers, or find out what makes the handlers slow.'),
    ('queue_undeclared', 'warning',
    'A queue that is not declared has jobs, and no worker can claim them.',
    'Declare it again until its jobs have ended: lenso-jobs configure.'),
    ('queue_paused', 'notice',
    'An operator has paused a queue, so none of its jobs is claimed.',
    'Resume the queue when its jobs may run again: lenso-jobs resume.'),
    ('leases_expired', 'warning',
    'Leases ran out more than a minute ago, and no worker claimed their jobs.',
    'Start workers of that queue. retire_expired ends jobs without attempts left.'),
    ('lease_held_long', 'warning',
    'A lease has been renewed for a day, or for 100 times its length.',
    'Its handler may hang. Restart its worker: the job is then claimed again.'),
    ('lease_broken', 'warning',
    'A live job has half a lease: somebody wrote to live_job by hand.',
    'As the owner, let the lease expire: the next claim takes or ends the job.'),
    ('job_lost', 'critical',
    'A job is neither live nor ended: somebody deleted its rows by hand.',
    'lenso-jobs explain with the id of the job says how to put it back.'),
    ('live_row_stray', 'critical',
    'A row of live_job has no row in job, so no worker gets its payload.',
    'Restore the rows of job from a backup.'),
    ('jobs_far_ahead', 'warning', 'Jobs fall due in more than ten years.',
    'A producer may have mistaken a unit of time. The runbook has the statement that '
    'makes them due.'),
    ('jobs_failing', 'warning',
    'Of a queue''s jobs that ended lately, twenty or more and half of all failed.',
    'inspect_failures shows them. Mend the cause, then redrive_failed.'),
    ('kind_failing', 'warning',
    'Of the last jobs of one kind, five or more and a tenth of all failed.',
    'inspect_failures shows them. Mend the cause, then redrive_failed.'),
    ('snapshot_held', 'warning',
    'An old snapshot keeps dead rows from being cleaned up.',
    'End the transaction: pg_terminate_backend, ROLLBACK PREPARED, or '
    'pg_drop_replication_slot. Claims stay fast meanwhile; the table grows.'),
    ('transaction_open', 'warning',
    'A transaction that wrote to this Instance has been open for long.',
    'Have it commit or roll back, or end it: pg_terminate_backend, or ROLLBACK '
    'PREPARED. COMMIT PREPARED keeps what it did, a complete for example.'),
    ('autovacuum_behind', 'warning',
    'Autovacuum leaves many more dead rows than it should.',
    'Look for what holds it up: snapshot_held, or all autovacuum workers busy. VACUUM '
    'the table.'),
    ('autovacuum_off', 'critical',
    'Autovacuum is switched off for a table that needs it every minute.',
    'Set autovacuum and track_counts on, and the table''s autovacuum_enabled.'),
    ('table_bloated', 'notice', 'The table takes far more room than its rows need.',
    'Claims stay fast. In a quiet hour VACUUM FULL the table, or use pg_repack.'),
    ('notify_queue_filling', 'critical',
    'The server''s queue of notifications fills up. Once full, enqueue fails.',
    'End the session that listens inside an open transaction; or set notify to false: '
    'lenso-jobs configure.'),
    ('connections_scarce', 'warning', 'The server has few connections left.',
    'End sessions that are not needed, raise max_connections, or use a pooler.'),
    ('slot_keeps_wal', 'warning',
    'A replication slot keeps much WAL, and may fill the disk.',
    'Start what reads from the slot, or drop it: pg_drop_replication_slot.'),
    ('slot_invalid', 'warning',
    'A replication slot was invalidated, and nothing can read from it.',
    'Drop the slot, and make its standby or subscription anew.'),
    ('setting_harmful', 'critical',
    'A setting makes the calls of declared callers fail.',
    'Reset it. Open sessions keep it: have them reconnect.'),
    ('object_changed', 'critical',
    'A table is missing or lost, or objects differ from what was installed.',
    'lenso-jobs check'),
    ('sequence_behind', 'critical',
    'A sequence gives numbers that are taken, so every operator act fails.',
    'Set the sequence to the highest number in use: setval.'),
    ('index_unusable', 'critical',
    'An index is missing, not valid, or not as installed.',
    'lenso-jobs upgrade --repair'),
    ('grant_missing', 'critical', 'A group has lost a right that its members need.',
    'lenso-jobs upgrade --repair'),
    ('grant_stray', 'warning', 'A role holds a right that the Instance does not give.',
    'Revoke it.'),
    ('role_missing', 'critical',
    'A role that the Instance rests on does not exist, or was renamed.',
    'Rename it back if it was renamed. If it was dropped: lenso-jobs setup.'),
    ('role_unsafe', 'warning', 'A role of the Instance can do more than it should.',
    'Take that away from it.'),
    ('membership_missing', 'critical',
    'A declared caller is not a member of its group, and is refused.',
    'lenso-jobs configure grants it. If it was revoked on purpose, take the caller out '
    'of the document first.'),
    ('membership_stray', 'warning',
    'A role is a member of a group, and the document does not declare it.',
    'Declare it, or revoke the group from it.'),
    ('migration_unfinished', 'critical', 'A migration is at work, or was cut off.',
    'If none is at work: lenso-jobs upgrade'),
    ('clock_went_back', 'critical', 'Times on record lie ahead of the server''s clock.',
    'Correct the clock. Until then leases last longer, and retries wait longer.'),
    ('retention_overdue', 'notice',
    'Ended jobs are kept for longer than retention_seconds.',
    'Have a scheduler call enforce_retention: lenso-jobs purge --retention.'),
    ('shard_unreachable', 'critical', 'A shard of a fleet cannot be reached.',
    'Start its server, or mend the way to it. Then run lenso-jobs fleet check.'),
    ('not_readable', 'warning',
    'A part of inspect_health failed, so its findings are missing.',
    'Give the Instance''s owner the right to read what the message names.')
) as f (finding, severity, meaning, remedy);
comment on view health_finding is
'Every finding of inspect_health, how bad it is, what it means and what to do.';
-- current_user is the owner inside a definer function, and session_user ignores SET
-- ROLE. The role setting cannot be forged: setting it takes membership.
create or replace function _caller()
returns text
language sql stable parallel restricted as $$
    select coalesce(nullif(current_setting('role'), 'none'), session_user)::text
$$;
comment on function _caller() is
'The caller Instance: the role in force by SET ROLE, else the session''s own.';
create or replace function _catalogue_digest()
returns text language sql stable as $$
    select
        encode(
            sha256(convert_to(string_agg(d.text, ', ' order by d.text), 'UTF8')), 'hex'
        )
    from pg_namespace as n
    cross join _catalogue_objects(n.nspname::text) as o
    cross join lateral (
        select _catalogue_digested(o.kind, o.name, o.facts, pg_get_userbyid(n.nspowner)::text)
        collate "C"
    ) as d (text)
    where n.nspname = current_schema()
$$;
comment on function _catalogue_digest() is
'The SHA-256 of what the tables, functions and types of this Instance are now.';
-- Only what the verbs rest on, and only facts that are the same after a dump and
-- restore and on every supported version of PostgreSQL. A further table or plain index
-- of the DBA's is left out, as are comments, storage options and grants.
create or replace function _catalogue_digested(
    p_kind text, p_name text, p_facts jsonb, p_owner text
)
returns text language sql immutable as $$
    select case
        when case
            when p_kind in ('function', 'type', 'domain') then true
            when p_kind in ('schema', 'migration table') then false
            when p_kind = 'view' then p_name = any(array[
                'error_code', 'explain_reason', 'health_finding', 'installed_version'
            ])
            when p_kind = 'index' and not (
                (p_facts -> 'unique')::boolean and (p_facts -> 'valid')::boolean
            ) then false
            else coalesce(p_facts ->> 'of' = 'domain', false) or coalesce(
                p_facts ->> 'table', p_facts ->> 'on', p_facts ->> 'of', p_name
            ) = any(_catalogue_tables())
        end
            then concat_ws(
                ' ', p_kind, p_name, p_facts ->> 'owner' = p_owner,
                p_facts - array[
                    'owner', 'place', 'grants', 'type grants', 'comment', 'options',
                    'made', 'position', case p_kind when 'view' then 'definition' end
                ]
            )
    end
$$;
comment on function _catalogue_digested(text, text, jsonb, text) is
'What the digest is taken of, for one object of _catalogue_objects; NULL: it does not '
'count.';
-- Far cheaper than the digest, and another one after a dump and restore: then the
-- digest decides. Each change of an object writes its row of the catalogue anew.
create or replace function _catalogue_fingerprint()
returns text language plpgsql stable
set enable_seqscan = on
set enable_hashjoin = on
as $$
begin
    return (
        with home as (
            select n.oid, n.xmin as version, n.nspowner as owner,
                left(pg_get_userbyid(n.nspowner), -5) as prefix
            from pg_namespace as n
            where n.nspname = current_schema()
        ),
        relation as (
            select c.oid, c.xmin as version
            from home as h
            join pg_class as c on c.relnamespace = h.oid
            -- Those of a new queue are new, and nobody else has a right on them.
            where not (
                c.relkind = 'S' and c.relowner = h.owner
                and starts_with(c.relname, 'claim_floor_')
                and not exists (
                    select from aclexplode(c.relacl) as a where a.grantee <> c.relowner
                )
            )
        ),
        seen (kind, oid, version) as (
            select 'n', h.oid, h.version::text from home as h
            union all select 'd', 0, d.digest from installed_digest as d
            union all
            select 'role', r.oid, r.rolname
            from home as h
            join pg_roles as r on left(r.rolname, length(h.prefix)) = h.prefix
            union all
            select 'p', p.oid, p.xmin::text
            from home as h
            join pg_proc as p on p.pronamespace = h.oid
            union all
            select 't', t.oid, t.xmin::text
            from home as h
            join pg_type as t on t.typnamespace = h.oid
            union all
            select 'k', k.oid, k.xmin::text
            from home as h
            join pg_constraint as k on k.connamespace = h.oid
            union all select 'r', r.oid, r.version::text from relation as r
            union all
            select 'a', r.oid, a.attnum || ' ' || a.xmin
            from relation as r
            join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0
            union all
            select 'i', r.oid, i.xmin::text
            from relation as r
            join pg_index as i on i.indexrelid = r.oid
            union all
            select 'e', d.oid, d.xmin::text
            from relation as r
            join pg_attrdef as d on d.adrelid = r.oid
            union all
            select 'g', g.oid, g.xmin::text
            from relation as r
            join pg_trigger as g on g.tgrelid = r.oid
            union all
            select 'w', w.oid, w.xmin::text
            from relation as r
            join pg_rewrite as w on w.ev_class = r.oid
            union all
            select 'y', y.oid, y.xmin::text
            from relation as r
            join pg_policy as y on y.polrelid = r.oid
        )
        select
            encode(
                sha256(convert_to(string_agg(s::text, ' ' order by s::text), 'UTF8')), 'hex'
            )
        from seen as s
    );
end;
$$;
comment on function _catalogue_fingerprint() is
'Which versions of its objects this Instance has now: the same while nobody changes '
'one.';
-- The whole permission model: each group has these rights, and nobody has another.
create or replace function _catalogue_grants()
returns table (role_kind text, object text, privilege text)
language sql immutable as $$
    select r.kind, g.object,
        case split_part(g.object, ' ', 1)
            when 'schema' then 'USAGE' when 'view' then 'SELECT' else 'EXECUTE'
        end
    from (
        values
            ('producer worker observer operator', 'schema'),
            ('producer worker observer operator', 'view error_code'),
            ('producer worker observer operator', 'view explain_reason'),
            ('producer worker observer operator', 'view health_finding'),
            ('producer worker observer operator', 'view installed_version'),

            (
                'producer',
                'function '
                'enqueue(text,text,jsonb,text,timestamp with time zone,integer)'
            ),
            ('producer', 'function enqueue_many(jsonb)'),

            ('worker', 'function claim(text,integer)'),
            ('worker', 'function renew(uuid,text)'),
            ('worker', 'function renew_many(uuid[],text[])'),
            ('worker', 'function complete(uuid,text)'),
            ('worker', 'function complete_many(uuid[],text[])'),
            ('worker', 'function fail(uuid,text,text,boolean,integer)'),
            ('worker', 'function fail_many(uuid[],text[],text[],boolean[],integer[])'),
            ('worker', 'function release(uuid,text,integer)'),
            ('worker', 'function release_many(uuid[],text[],integer[])'),
            ('worker', 'function next_available_at(text)'),
            ('worker', 'function wait_key(text)'),

            ('producer worker observer operator', 'function inspect(uuid)'),

            ('producer observer operator', 'function inspect_key(text,text)'),

            ('observer operator', 'function inspect_attempts(uuid)'),
            ('observer operator', 'function inspect_jobs(text,text,text,integer,uuid)'),
            ('observer operator', 'function inspect_queues()'),
            ('observer operator', 'function inspect_workers()'),
            (
                'observer operator',
                'function inspect_failures(text,timestamp with time zone,integer,text,'
                'timestamp with time zone,uuid,text)'
            ),
            ('observer operator', 'function inspect_acts(integer,bigint)'),
            ('observer operator', 'function inspect_health()'),
            ('observer operator', 'function explain_job(uuid)'),

            ('operator', 'function redrive(uuid,integer)'),
            (
                'operator',
                'function redrive_failed(text,timestamp with time zone,'
                'timestamp with time zone,text,integer,integer,integer,text)'
            ),
            ('operator', 'function purge(timestamp with time zone,integer)'),
            ('operator', 'function enforce_retention(integer)'),
            ('operator', 'function retire_expired(integer)'),
            ('operator', 'function pause(text)'),
            ('operator', 'function resume(text)'),
            ('operator', 'function erase(uuid)')
    ) as g (kinds, object)
    cross join unnest(string_to_array(g.kinds, ' ')) as r (kind)
$$;
comment on function _catalogue_grants() is
'Which group may use which object, and how: all the rights that the Instance gives.';
-- Asked before anything is read: what reads a table that is gone fails. The names are
-- looked for in the Instance's schema alone, and not among a caller's temporary tables.
create or replace function _catalogue_lost_table()
returns table (subject text, detail text)
language sql stable as $$
    select
        case when t.name = any(_catalogue_tables()) then 'table ' else 'view ' end || t.name,
        case
            when c.oid is null then 'is missing'
            when row_security_active(c.oid) then 'hides rows: its row security is on'
            else 'is lost: the Instance''s owner has lost its own table'
        end
    from unnest(
        _catalogue_tables() || array['health_finding', 'explain_reason']
    ) as t (name)
    cross join lateral (
        select to_regclass(format('%I.%I', current_schema(), t.name))::oid
    ) as c (oid)
    where not coalesce(has_table_privilege(c.oid, 'select'), false)
        or row_security_active(c.oid)
        or (
            t.name = any(_catalogue_tables())
            and not (
                has_table_privilege(c.oid, 'insert')
                and has_table_privilege(c.oid, 'update')
                and has_table_privilege(c.oid, 'delete')
            )
        )
    limit 1
$$;
comment on function _catalogue_lost_table() is
'One of the tables and views that the reads need, and that is missing or that the '
'owner may not use in full; no row while all are there.';
-- The caller puts the schema first in its search_path: names are then the same in two
-- schemas. Nothing here calls a function of this Instance, because check describes an
-- Instance that it does not trust by the query of a copy that it loaded beside it.
create or replace function _catalogue_objects(p_schema text)
returns table (kind text, name text, facts jsonb)
language plpgsql stable
set quote_all_identifiers = off
set jit = off
set enable_seqscan = on
set enable_hashjoin = on
set enable_sort = on
as $$
begin
    return query
    with home as (select n.* from pg_namespace as n where n.nspname = p_schema),
    relation as (
        select c.*, c.relname ~ '^_?yoyo_' as is_yoyo,
            format('%I.%I', p_schema, c.relname) as place
        from pg_class as c
        join home as h on h.oid = c.relnamespace
    ),
    described (kind, name, place, acl, type_acl, facts) as (
        select 'schema', h.nspname::text, format('schema %I', h.nspname),
            coalesce(h.nspacl, acldefault('n', h.nspowner)), null::aclitem[],
            jsonb_build_object('owner', pg_get_userbyid(h.nspowner))
        from home as h
        union all
        select 'function', p.oid::regprocedure::text,
            'routine ' || (pg_identify_object('pg_proc'::regclass, p.oid, 0)).identity,
            coalesce(p.proacl, acldefault('f', p.proowner)), null,
            jsonb_build_object(
                'definition',
                case when p.prokind in ('f', 'p') then pg_get_functiondef(p.oid) end,
                'signature', concat_ws(
                    ' ', pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
                ),
                'owner', pg_get_userbyid(p.proowner),
                'comment', obj_description(p.oid, 'pg_proc')
            )
        from pg_proc as p
        join home as h on h.oid = p.pronamespace
        union all
        select
            case
                when r.is_yoyo then 'migration table' when r.relkind = 'v' then 'view'
                when r.relkind = 'S' then 'sequence' when r.relkind = 'c' then 'type'
                else 'table'
            end,
            r.relname,
            case r.relkind when 'S' then 'sequence ' else 'table ' end || r.place,
            case r.relkind
                when 'S' then coalesce(r.relacl, acldefault('s', r.relowner))
                when 'c' then null
                else coalesce(r.relacl, acldefault('r', r.relowner))
            end,
            coalesce(y.typacl, acldefault('T', y.typowner)),
            jsonb_build_object(
                'relkind', r.relkind, 'persistence', r.relpersistence,
                'owner', pg_get_userbyid(r.relowner), 'made', r.oid::bigint,
                'options', array(select unnest(r.reloptions) order by 1),
                'row security', concat(r.relrowsecurity, r.relforcerowsecurity),
                -- A table of a publication then refuses every UPDATE and DELETE.
                'replica identity', case
                    when r.relkind = 'r' and r.relreplident = 'n' then 'nothing'
                end,
                'columns', case when r.relkind = 'v' then a.list end,
                'table', s.refobjid::regclass,
                'definition', case r.relkind
                    when 'v' then pg_get_viewdef(r.oid) when 'c' then a.list
                    when 'S' then (
                        select
                            format(
                                'as %s increment %s minvalue %s maxvalue %s start %s '
                                'cache %s%s cycle', q.seqtypid::regtype, q.seqincrement,
                                q.seqmin, q.seqmax, q.seqstart, q.seqcache,
                                case when not q.seqcycle then ' no' end
                            )
                        from pg_sequence as q
                        where q.seqrelid = r.oid
                    )
                end,
                'comment', obj_description(r.oid, 'pg_class')
            )
        from relation as r
        left join pg_type as y on y.oid = r.reltype
        left join pg_depend as s
            on r.relkind = 'S' and s.deptype in ('a', 'i')
            and (s.classid, s.objid) = ('pg_class'::regclass, r.oid)
        cross join lateral (
            select
                string_agg(
                    format('%I %s', t.attname, format_type(t.atttypid, t.atttypmod)),
                    ', ' order by t.attnum
                ) as list
            from pg_attribute as t
            where r.relkind in ('v', 'c')
                and t.attrelid = r.oid and t.attnum > 0 and not t.attisdropped
        ) as a
        where r.relkind in ('r', 'v', 'S', 'c', 'm', 'p', 'f')
        union all
        select 'column', format('%I.%I', r.relname, t.attname), 'table ' || r.place,
            t.attacl, null,
            jsonb_build_object(
                'table', r.relname, 'column', t.attname, 'relkind', r.relkind,
                'position', t.attnum,
                'not null', t.attnotnull, 'identity', t.attidentity,
                'type', case
                    when r.relkind <> 'v' then concat_ws(
                        ' collate ', format_type(t.atttypid, t.atttypmod),
                        nullif(t.attcollation, y.typcollation)::regcollation
                    )
                end,
                'domain', case when y.typnamespace = r.relnamespace then y.typname end,
                'default', pg_get_expr(d.adbin, d.adrelid),
                'comment', col_description(r.oid, t.attnum)
            )
        from relation as r
        join pg_attribute as t on t.attrelid = r.oid
        join pg_type as y on y.oid = t.atttypid
        left join pg_attrdef as d on d.adrelid = t.attrelid and d.adnum = t.attnum
        where r.relkind in ('r', 'v', 'p', 'f') and not r.is_yoyo
            and t.attnum > 0 and not t.attisdropped
        union all
        -- From 18 on NOT NULL is a constraint; the column says it in every version.
        select 'constraint', format('%I.%I', coalesce(r.relname, t.typname), k.conname),
            null, null, null,
            jsonb_build_object(
                'of', case when r.oid is null then 'domain' else 'table' end,
                'on', coalesce(r.relname, t.typname), 'name', k.conname,
                'columns', array(
                    select format('%I.%I', r.relname, a.attname)
                    from pg_attribute as a
                    where a.attrelid = r.oid and a.attnum = any(k.conkey)
                    order by a.attnum
                ),
                'definition',
                regexp_replace(pg_get_constraintdef(k.oid), ' NOT VALID$', ''),
                'validated', k.convalidated
            )
        from pg_constraint as k
        join home as h on h.oid = k.connamespace
        left join relation as r on r.oid = k.conrelid
        left join pg_type as t on t.oid = k.contypid
        where k.contype <> 'n' and r.is_yoyo is not true
        union all
        select 'index', x.relname, null, null, null,
            jsonb_build_object(
                'of', r.relname, 'definition', pg_get_indexdef(x.oid),
                'unique', i.indisunique,
                'valid', i.indisvalid and i.indisready and i.indislive,
                'columns', array(
                    select format('%I.%I', r.relname, a.attname)
                    from pg_attribute as a
                    where a.attrelid = r.oid and a.attnum = any(i.indkey)
                    order by a.attnum
                ),
                'constraint',
                exists (select from pg_constraint as k where k.conindid = x.oid),
                'options', array(select unnest(x.reloptions) order by 1)
            )
        from relation as x
        join pg_index as i on i.indexrelid = x.oid
        join relation as r on r.oid = i.indrelid and not r.is_yoyo
        where not exists (
            select from pg_stat_progress_create_index as p
            where p.datname = current_database() and p.index_relid = x.oid
        )
        union all
        select o.kind, format('%I.%I', r.relname, o.name), null, null, null,
            jsonb_build_object(
                'of', r.relname, 'name', o.name,
                'definition', o.definition, 'enabled', o.enabled
            )
        from relation as r
        join (
            select 'trigger', g.tgrelid, g.tgname, pg_get_triggerdef(g.oid), g.tgenabled
            from pg_trigger as g
            where not g.tgisinternal
            union all
            select 'rule', w.ev_class, w.rulename, null, w.ev_enabled
            from pg_rewrite as w
            where w.rulename <> '_RETURN'
            union all
            select 'policy', y.polrelid, y.polname, null, null
            from pg_policy as y
        ) as o (kind, relation, name, definition, enabled) on o.relation = r.oid
        union all
        select case t.typtype when 'd' then 'domain' else 'type' end, t.typname,
            format('type %I.%I', p_schema, t.typname),
            coalesce(t.typacl, acldefault('T', t.typowner)), null,
            jsonb_build_object(
                'type', concat_ws(
                    ' ', format_type(t.typbasetype, t.typtypmod),
                    t.typcollation::regcollation
                ),
                'not null', t.typnotnull, 'owner', pg_get_userbyid(t.typowner),
                'comment', obj_description(t.oid, 'pg_type')
            )
        from pg_type as t
        join home as h on h.oid = t.typnamespace
        where t.typtype in ('d', 'e', 'r')
    )
    select d.kind, d.name,
        d.facts || jsonb_build_object(
            'place', replace(d.place, 'pg_catalog.', ''),
            'grants', coalesce(g.words, '{}'),
            'type grants', coalesce(g.type_words, '{}')
        )
    from described as d
    cross join lateral (
        select
            array_agg(w.word order by w.word collate "C") filter (where not w.of_type),
            array_agg(w.word order by w.word collate "C") filter (where w.of_type)
        from (
            select a.of_type, concat(
                case a.grantee
                    when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee))
                end,
                ' ', a.privilege_type,
                case when a.is_grantable then ' with grant option' end
            )
            from (
                select false, x.* from aclexplode(d.acl) as x
                union all
                select true, x.* from aclexplode(d.type_acl) as x
            ) as a (of_type, grantor, grantee, privilege_type, is_grantable)
        ) as w (of_type, word)
    ) as g (words, type_words);
end;
$$;
comment on function _catalogue_objects(text) is
'Every object of a schema, each with the facts that check compares: definition, owner, '
'grants, comment and so on.';
-- Called with true only where somebody knows that the objects are as the release has
-- them: set-up, upgrade and repair after their own check, and a migration by
-- 9_seal.sql.
create or replace function _catalogue_store_digest(p_is_sound boolean)
returns void language sql volatile as $$
    insert into installed_digest (digest)
    values (case when p_is_sound then _catalogue_digest() end)
    on conflict (is_only) do update
    set digest = excluded.digest, stored_at = excluded.stored_at, fingerprint = null;
    update installed_digest
    set fingerprint = _catalogue_fingerprint()
    where not exists (select from _health_part('objects'))
$$;
comment on function _catalogue_store_digest(boolean) is
'Stores the digest of the objects for inspect_health to compare with; NULL where they '
'may differ from the release. Stores the fingerprint where nothing at all is found.';
create or replace function _catalogue_tables()
returns text[] language sql immutable as $$
    select array[
        'instance', 'caller', 'queue', 'job', 'live_job', 'attempt', 'operator_act',
        'installed_digest'
    ]
$$;
comment on function _catalogue_tables() is 'The tables of an Instance.';
-- Runs under the planner settings of claim, which alone calls it. A claim that passed
-- over more than 100 entries moves the floor to where it stopped.
create or replace function _claim_due(p_queue text, p_limit integer, p_floor regclass[])
returns tid[] language plpgsql volatile as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_retire integer     := 64;
    v_wanted integer     := p_limit;
    v_rows   tid[]       := array[]::tid[];
    v_bytes  integer[]   := array[]::integer[];
    v_passed bigint;
    v_full   boolean;
    v_start  record;
    v_found  record;
begin
    v_start := _claim_floor(p_floor, v_now);
    v_full := coalesce(v_start.scan_at <= v_now, true);
    loop
        if v_full and v_start.at > '-infinity' then
            -- No other session scans now. If this one dies in its scan, or its claim is
            -- refused above READ COMMITTED, another scans a second later or so.
            perform _claim_floor_scanned(p_floor, v_now, null);
            v_start.at := '-infinity';
        end if;
        v_passed := - _claim_entries_read();
        loop
            -- The rows are locked before anything is written, and no more than are
            -- wanted: an update that joins its own candidates may, under some plans,
            -- take them all.
            select count(*)::integer as rows, max(d.available_at) as last_at,
                array_agg(d.job_id) as job_ids, count(*) filter (where d.is_odd) as odd,
                array_agg(d.ctid) filter (where d.attempt < d.max_attempts) as leasable,
                array_agg(d.payload_bytes) filter (where d.attempt < d.max_attempts)
                as bytes
            into v_found
            from (
                select l.ctid, l.job_id, l.available_at, l.attempt, l.max_attempts,
                    l.payload_bytes,
                    l.attempt >= l.max_attempts or num_nonnulls(
                        l.leased_at, l.lease_expires_at, l.lease_owner,
                        l.lease_token_hash
                    ) > 0 as is_odd
                from live_job as l
                where l.queue = p_queue
                    and l.available_at <= v_now
                    and (l.available_at, l.job_id) > (v_start.at, v_start.id)
                    and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
                    and (l.attempt < l.max_attempts or v_retire > 0)
                order by l.available_at, l.job_id
                limit v_wanted
                for update skip locked
            ) as d;
            exit when v_found.rows = 0;
            v_passed := v_passed - v_found.rows;
            v_start.at := v_found.last_at;
            v_start.id := v_found.job_ids[v_found.rows];
            if v_found.odd > 0 then
                v_retire := v_retire - _claim_reclaim(v_found.job_ids, v_retire);
            end if;

            -- Rows that cannot be leased were ended or passed over: look behind them.
            v_rows := v_rows || v_found.leasable;
            v_bytes := v_bytes || v_found.bytes;
            exit when v_found.rows < v_wanted or cardinality(v_rows) = p_limit;
            v_wanted := p_limit - cardinality(v_rows);
        end loop;
        v_passed := v_passed + _claim_entries_read();
        exit when v_full or v_rows <> '{}' or v_now < v_start.may_scan_at;
        v_full := true;
        v_now := clock_timestamp();
    end loop;

    -- A claim returns at most 16 MB of payloads, which 64 of the largest are. The jobs
    -- beyond stay queued, so no floor may hide them.
    if cardinality(v_rows) > 64 then
        select v_rows[1:count(*)::integer] into v_rows
        from (
            select sum(coalesce(b.bytes, 0)) over (rows unbounded preceding) as upto
            from unnest(v_bytes) as b (bytes)
        ) as s
        where s.upto <= 16777216;
        if cardinality(v_rows) < cardinality(v_bytes) then
            v_passed := 0;
        end if;
    end if;

    if v_passed > 100 then
        perform _claim_floor_move(
            p_floor, v_start.was, v_now, v_full,
            case when v_found.rows = v_wanted then v_start.at end, v_start.id
        );
    elsif v_full and v_start.was is not null then
        perform setval(p_floor[1], 0, false);
    end if;
    return v_rows;
end;
$$;
comment on function _claim_due(text, integer, regclass[]) is
'Locks up to p_limit due jobs for claim and returns where they are. Reclaims the '
'lapsed leases among them, and keeps the claim floor of the queue.';
create or replace function _claim_entries_read()
returns bigint language sql volatile as $$
    select pg_stat_get_xact_tuples_returned('live_job_claimable_idx'::regclass)
$$;
comment on function _claim_entries_read() is
'How many entries of the claimable index this transaction has read so far.';
-- A scan of the index passes every entry that is dead or running, by the ten thousand
-- while a snapshot is held elsewhere. So the sessions share a place to begin at. It is
-- kept in three sequences a queue: a sequence is written in place, leaves no dead row
-- and knows no rollback. Not unlogged: PostgreSQL 18 cannot read one that was made
-- shortly before a standby was promoted.
--
-- It is a hint. Late commits, lapsed leases and claims that were rolled back lie below
-- it, and are found by the next full scan. A place or a scan in the future was written
-- by another clock and does not count.
create or replace function _claim_floor(
    p_floor         regclass[],
    p_now           timestamptz,
    out was         bigint,
    out at          timestamptz,
    out id          uuid,
    out scan_at     timestamptz,
    out may_scan_at timestamptz
)
language plpgsql volatile as $$
declare
    v_scanned bigint;
    v_pause   interval;
begin
    was := pg_sequence_last_value(p_floor[1]);
    if was is not null then
        v_scanned := coalesce(pg_sequence_last_value(p_floor[3]), 0);
        at := timestamptz 'epoch' + was * interval '1 microsecond';
        may_scan_at := timestamptz 'epoch' + (v_scanned >> 12) * interval '1 millisecond';
        if at <= p_now and may_scan_at <= p_now then
            id := (
                lpad(to_hex(coalesce(pg_sequence_last_value(p_floor[2]), 0)), 15, '0')
                || '00000000000000000'
            )::uuid;
            v_pause := least(3000, v_scanned & 4095) * interval '10 milliseconds';
            scan_at := may_scan_at + greatest(v_pause, interval '1 second');
            -- Below 2 ms a claim that finds nothing scans at once.
            if v_pause >= interval '100 milliseconds' then
                may_scan_at := may_scan_at + v_pause;
            end if;
            return;
        end if;
    end if;
    at := timestamptz '-infinity';
    id := uuid '00000000-0000-0000-0000-000000000000';
    may_scan_at := null;
end;
$$;
comment on function _claim_floor(regclass[], timestamptz) is
'Where a claim begins: behind this due time and id. Also when the next full scan is '
'due, and when one is allowed to a claim that finds nothing. Both are NULL if there is '
'no floor, and then each scan is full.';
create or replace function _claim_floor_is_whole(p_floor regclass[])
returns boolean language sql stable as $$
    select count(*) = 3
    from pg_sequence as s
    where s.seqrelid = any (p_floor)
        and (s.seqincrement, s.seqmin, s.seqcache, s.seqcycle) = (1, 0, 1, false)
        and s.seqmax = 9223372036854775807
$$;
comment on function _claim_floor_is_whole(regclass[]) is
'Whether the three sequences of a queue''s claim floor are there and unaltered.';
-- The ids of jobs are ordered by time: their first 60 bits are enough to tell apart
-- jobs that fell due at one instant. Sessions may interleave these writes; that may
-- hide jobs of one instant until the next full scan. A place that another session has
-- set since is left alone: it may have found older jobs. The last 20 ms stay above the
-- floor: an enqueue takes its due time before it commits.
create or replace function _claim_floor_move(
    p_floor regclass[], p_was bigint, p_began timestamptz, p_is_full boolean,
    p_at timestamptz, p_id uuid
)
returns void language plpgsql volatile as $$
declare
    v_highest timestamptz := p_began - interval '20 milliseconds';
begin
    if p_is_full then
        perform _claim_floor_scanned(p_floor, p_began, clock_timestamp() - p_began);
    elsif pg_sequence_last_value(p_floor[1]) is distinct from p_was then
        return;
    end if;
    perform setval(
        p_floor[2],
        case when p_at <= v_highest
            then ('x' || left(replace(p_id::text, '-', ''), 15))::bit(60)::bigint
            else 0
        end
    );
    perform setval(
        p_floor[1], (date_part('epoch', least(p_at, v_highest)) * 1000000)::bigint
    );
end;
$$;
comment on function
_claim_floor_move(regclass[], bigint, timestamptz, boolean, timestamptz, uuid) is
'Lets later claims begin behind the due time and id at which a scan stopped; a NULL '
'due time says that it found the end. Records a full scan.';
create or replace function _claim_floor_of(p_floors regclass[], p_place integer)
returns regclass[] language sql stable as $$
    select case
        when has_sequence_privilege(p_floors[3 * p_place - 2], 'update')
            and has_sequence_privilege(p_floors[3 * p_place - 1], 'update')
            and has_sequence_privilege(p_floors[3 * p_place], 'update')
            then p_floors[3 * p_place - 2:3 * p_place]
    end
$$;
comment on function _claim_floor_of(regclass[], integer) is
'The three sequences of one queue''s claim floor; NULL where one was dropped or given '
'away: each scan is full then.';
-- One number holds both. Above its lowest 12 bits is the millisecond of the scan,
-- rounded down so that it is never in the future. The 12 bits are what the scan took,
-- in steps of 200 us, at most 0.6 s: 50 times as long is at most 30 s.
create or replace function _claim_floor_scanned(
    p_floor regclass[], p_at timestamptz, p_took interval
)
returns void language sql volatile as $$
    select setval(
        p_floor[3],
        (floor(date_part('epoch', p_at) * 1000)::bigint << 12)
        + least(3000, coalesce(
            (date_part('epoch', p_took) * 5000)::bigint,
            greatest(100, pg_sequence_last_value(p_floor[3]) & 4095)
        ))
    )
$$;
comment on function _claim_floor_scanned(regclass[], timestamptz, interval) is
'Records when a full scan was made and how long it took; NULL: it begins, and is taken '
'to last as long as the one before, or 20 ms.';
-- The sequences of a queue that is no longer declared stay, because a claim may be
-- about to read them. The next new queue takes them.
create or replace function _claim_floors_made()
returns void language plpgsql volatile security definer
set search_path from current as $$
declare
    v_queue text;
    v_names text[];
    v_name  text;
    v_role  text;
begin
    for v_queue in
        select q.queue
        from queue as q
        where not _claim_floor_is_whole(q.floor)
    loop
        for v_number in 1 .. 1000000 loop
            v_names := array[
                format('claim_floor_%s_at', v_number),
                format('claim_floor_%s_id', v_number),
                format('claim_floor_%s_scan', v_number)
            ];
            exit when not exists (
                select
                from queue as q
                cross join unnest(v_names) as n (name)
                where q.queue <> v_queue and to_regclass(n.name) = any (q.floor)
            );
        end loop;
        foreach v_name in array v_names loop
            if to_regclass(v_name) is null then
                execute format('create sequence %I minvalue 0', v_name);
            else
                execute format(
                    'alter sequence %I as bigint increment 1 minvalue 0 no maxvalue '
                    'start 0 restart 0 cache 1 no cycle', v_name
                );
            end if;
            -- What default privileges gave away.
            execute format('revoke all on sequence %I from public', v_name);
            for v_role in
                select r.rolname::text
                from pg_class as c
                cross join aclexplode(c.relacl) as a
                join pg_roles as r on r.oid = a.grantee
                where c.oid = to_regclass(v_name) and a.grantee <> c.relowner
            loop
                execute format('revoke all on sequence %I from %I', v_name, v_role);
            end loop;
        end loop;
        update queue as q set floor = v_names::regclass[] where q.queue = v_queue;
    end loop;
end;
$$;
comment on function _claim_floors_made() is
'Gives each queue that lacks them, or whose are altered, the sequences of its claim '
'floor: new ones, its own, or some that no queue has.';
-- The caller holds the rows. A lease is recorded whichever of its four fields are left,
-- and a job without an attempt left is ended: a row broken by hand stops no queue. A
-- row of evidence that is there already stays, unless it says that another attempt
-- would follow.
create or replace function _claim_reclaim(p_job_ids uuid[], p_limit integer)
returns integer language sql volatile as $$
    with lapsed as materialized (
        select l.ctid, l.*, clock_timestamp() as ended_at
        from live_job as l
        where l.job_id = any (p_job_ids)
            and (
                l.attempt >= l.max_attempts
                or num_nonnulls(
                    l.leased_at, l.lease_expires_at, l.lease_owner, l.lease_token_hash
                ) > 0
            )
    ),
    ended as (
        delete from live_job as l
        where l.ctid = any (array(
            select e.ctid
            from lapsed as e
            where e.attempt >= e.max_attempts
            order by e.available_at, e.job_id
            limit p_limit
        ))
        returning l.job_id
    ),
    evidence as (
        insert into attempt as a (
            job_id, leased_at, ended_at, attempt, max_attempts,
            queue, worker, outcome, failure_code, lease_token_hash, holder
        )
        select e.job_id, coalesce(e.leased_at, e.ended_at), e.ended_at, e.attempt,
            e.max_attempts, e.queue, coalesce(e.lease_owner, 'unknown'), 'lease_expired',
            case when e.attempt >= e.max_attempts then 'attempts_exhausted' end,
            coalesce(e.lease_token_hash, ''), e.holder
        from lapsed as e
        where e.attempt < e.max_attempts
            or e.job_id in (select d.job_id from ended as d)
        on conflict (job_id, attempt) do update
        set
            outcome = 'failed',
            retry_at = null,
            failure_code = coalesce(a.failure_code, excluded.failure_code)
        where excluded.failure_code = 'attempts_exhausted'
            and a.outcome in ('retried', 'released')
    )
    select count(*)::integer from ended
$$;
comment on function _claim_reclaim(uuid[], integer) is
'Records the lapsed lease of each of these jobs, and ends up to p_limit of those that '
'have no attempt left. Returns how many ended.';
-- Bounds are the table's constraints to keep; this proves what a cast would bend into
-- them, a fraction or a number in quotes, and that the lists are lists of names.
create or replace function _document_fault(p_document jsonb, p_schema text)
returns text
language sql stable as $$
    select case
        when (jsonb_typeof(p_document) = 'object') is not true
            then 'the document must be a JSON object'
        when (p_document ->> 'schema' = p_schema) is not true
            then format('the document''s schema is not %I', p_schema)
        else (
            select string_agg(format(f.fault, f.name), '; ' order by f.name)
            from (
                select coalesce(k.name, d.key) as name,
                    case
                        when k.name is null
                            then '%I is not a field of the configuration'
                        when k.form = 'whole' and (
                            jsonb_typeof(d.value) is distinct from 'number'
                            or d.value::numeric % 1 <> 0
                        )
                            then '%s must be a whole number'
                        when k.form = 'number' and jsonb_typeof(d.value) <> 'number'
                            then '%s must be a number'
                        when k.form = 'boolean' and jsonb_typeof(d.value) <> 'boolean'
                            then '%s must be true or false'
                        when k.form = 'names' and (
                            jsonb_typeof(d.value) <> 'array'
                            or jsonb_path_exists(
                                d.value, 'strict $[*] ? (@.type() != "string")'
                            )
                            or jsonb_array_length(d.value) <> (
                                select count(distinct e.value)
                                from jsonb_array_elements(d.value) as e
                            )
                        )
                            then '%s must be a list of different names'
                        when k.form = 'names' and k.name <> 'observer_instances'
                            and coalesce(jsonb_array_length(d.value), 0) = 0
                            then '%s must name something'
                    end as fault
                from (
                    values
                        ('schema', ''), ('database_url_secret', ''), ('role_prefix', ''),
                        ('lease_seconds', 'whole'), ('retry_base_seconds', 'whole'),
                        ('retry_max_seconds', 'whole'), ('retry_jitter', 'number'),
                        ('notify', 'boolean'), ('queues', 'names'),
                        ('producer_instances', 'names'), ('worker_instances', 'names'),
                        ('observer_instances', 'names'),
                        (
                            'retention_seconds',
                            case
                                when p_document -> 'retention_seconds' <> 'null'
                                    then 'whole'
                                else ''
                            end
                        )
                ) as k (name, form)
                full join jsonb_each(p_document) as d on d.key = k.name
            ) as f
            where f.fault is not null
        )
    end
$$;
comment on function _document_fault(jsonb, text) is
'What is wrong with the form of a configuration document; NULL: nothing.';
create or replace function _document_stored()
returns jsonb
language sql stable as $$
    select jsonb_build_object(
        'lease_seconds', i.lease_seconds,
        'retry_base_seconds', i.retry_base_seconds,
        'retry_max_seconds', i.retry_max_seconds,
        'retry_jitter', i.retry_jitter,
        'notify', i.notify,
        'retention_seconds', i.retention_seconds,
        'queues', array(select q.queue from queue as q order by 1),
        'producer_instances', array(
            select c.caller from caller as c where c.is_producer order by 1
        ),
        'worker_instances', array(
            select c.caller from caller as c where c.is_worker order by 1
        ),
        'observer_instances', array(
            select c.caller from caller as c where c.is_observer order by 1
        )
    )
    from instance as i
$$;
comment on function _document_stored() is
'The fields of the configuration document that the Instance stores; NULL: no row of '
'policy.';
create or replace function _enqueue_again(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer, p_fault text
)
returns enqueued_job
language plpgsql stable
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
as $$
declare
    v_is_declared boolean;
    v_fault       text;
    v_known       record;
begin
    perform _require_producer();
    v_is_declared := exists (
        select from instance as i where p_queue collate "C" = any (i.queues)
    );
    v_fault := coalesce(
        p_fault,
        case when not v_is_declared then _enqueue_fault_in_full(
            p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
            p_max_attempts
        ) end
    );
    if v_fault is not null then
        raise exception using errcode = 'LJ001', message = v_fault;
    end if;
    if not v_is_declared then
        raise exception using errcode = 'LJ001',
            message = format('queue %s is not declared', p_queue),
            hint    = _queue_hint(p_queue);
    end if;

    -- The insert may have waited for a commit that its snapshot does not show; that of
    -- this call does. A purge may have taken the row since.
    select k.job_id, k.is_same into v_known
    from _enqueue_known_job(
        _caller(), p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
        p_max_attempts
    ) as k;
    if not v_known.is_same then
        raise exception using errcode = 'LJ002',
            message = 'idempotency_key was used for another intent',
            detail  = format('job_id=%s', v_known.job_id),
            hint    = 'Repeat the first intent unchanged, or choose a new key.';
    end if;
    return (v_known.job_id, false);
end;
$$;
comment on function
_enqueue_again(text, text, jsonb, text, timestamptz, integer, text) is
'What enqueue returns where its insert made no job: the job that has the key, or NULL '
'if it was just purged. Refuses what enqueue refuses.';
-- Nearly every job passes without the function in full. The queue is looked at where
-- it is not declared. A text of 256 bytes cannot have 129 levels or a number beyond
-- 1e308. The text is made once, because that is most of the cost of a larger payload.
create or replace function _enqueue_fault(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer
)
returns text
language sql stable as $$
    select case
        when
            p_available_at is null
            and p_max_attempts between 1 and 100
            and jsonb_typeof(p_payload) = 'object'
            and pg_column_compression(p_payload) is null
            and pg_column_size(p_payload) <= 4096
            and octet_length(p_kind || p_idempotency_key) <= 256
            and (p_kind || ' ' || p_idempotency_key) collate "C"
            ~ '^[A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+$'
            and case width_bucket(
                octet_length(p_payload::text), array[257, 262145]
            )
                when 0 then true
                when 1 then not _enqueue_is_beyond(p_payload)
                else false
            end
            then null
        else _enqueue_fault_in_full(
            p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
            p_max_attempts
        )
    end
$$;
comment on function _enqueue_fault(text, text, jsonb, text, timestamptz, integer) is
'What is wrong with the arguments of enqueue, by argument and limit; NULL: nothing, '
'unless the queue is not declared.';
-- The payload is looked at in an order that keeps hostile documents cheap: its size
-- once detoasted (what the concatenation is for; stored JSON is at most eight times its
-- text), then depth, which bounds the walk, then the size of every number. Ten bytes of
-- a number can be sixteen thousand digits of text: numbers of 64 characters and more
-- are counted, each written out by itself. Only then is text made of the whole.
create or replace function _enqueue_fault_in_full(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer
)
returns text
language plpgsql stable as $$
declare
    v_too_long constant text := 'payload must be at most 262144 bytes as text';
    v_fault    text          := case
        when not _is_name(p_queue, 128)
            then 'queue must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_kind, 256)
            then 'kind must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_idempotency_key, 256)
            then 'idempotency_key must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
        when (p_max_attempts between 1 and 100) is not true
            then 'max_attempts must be from 1 to 100'
        when (
            p_available_at >= '0001-01-01 00:00:00+00'
            and p_available_at < '10000-01-01 00:00:00+00'
        ) is false
            then 'available_at must be finite, from the year 1 to before the year 10000'
        when (jsonb_typeof(p_payload) = 'object') is not true
            then 'payload must be a JSON object'
        when pg_column_size(p_payload || '{}') > 2097152
            then v_too_long
        when _enqueue_is_beyond(p_payload)
            then 'payload must be nested at most 128 levels deep, and hold no number '
                 'beyond 1e308'
    end;
begin
    if v_fault is not null then
        return v_fault;
    end if;
    if pg_column_size(p_payload || '{}') > 8192 then
        perform
        from (
            select
            from jsonb_path_query(
                p_payload, 'strict $.** ? (@.type() == "number")'
            ) as n
            where length(n::text) >= 64
            limit 4096
        ) as long
        having count(*) = 4096;
        if found then
            return v_too_long;
        end if;
    end if;
    if octet_length(p_payload::text) > 262144 then
        return v_too_long;
    end if;
    return null;
end;
$$;
comment on function
_enqueue_fault_in_full(text, text, jsonb, text, timestamptz, integer) is
'What _enqueue_fault returns for a job that is not small, or not plainly sound.';
-- The form is proved before the cast, so that the cast can neither raise nor depend
-- on DateStyle or TimeZone: the letters go, because a session's own zone may be called
-- T or Z. No backslash: a caller may change what it means in a literal.
create or replace function _enqueue_instant(p_text text)
returns timestamptz
language sql stable as $$
    select case
        when p_text !~ (
            '^(?!0000)[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])'
            '[Tt]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?'
            '([Zz]|[+-](0[0-9]|1[0-5]):[0-5][0-9])$'
        )
            then null
        when substr(p_text, 9, 2)::integer > extract(
            day from
            make_date(substr(p_text, 1, 4)::integer, substr(p_text, 6, 2)::integer, 1)
            + make_interval(months => 1, days => -1)
        )
            then null
        else replace(replace(upper(p_text), 'T', ' '), 'Z', '+00:00')::timestamptz
    end
$$;
comment on function _enqueue_instant(text) is
'An RFC 3339 timestamp with its offset as an instant; NULL where it is none.';
create or replace function _enqueue_is_beyond(p_payload jsonb)
returns boolean
language sql immutable as $$
    select jsonb_path_match(
        p_payload,
        'strict exists($.**{129}) || exists(
            $.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))
        )'
    )
$$;
comment on function _enqueue_is_beyond(jsonb) is
'Whether a payload is nested more than 128 levels deep or holds a number beyond 1e308.';
-- A CASE decides before each cast, so that no item can raise and spoil its neighbours.
-- The planner inlines this into the statement that reads it.
create or replace function _enqueue_items(p_jobs jsonb)
returns table (
    "position" integer, queue text, kind text, payload jsonb, idempotency_key text,
    available_at timestamptz, max_attempts integer, is_valid boolean
)
language sql stable rows 1000 as $$
    select f.position, f.queue, f.kind, f.payload, f.idempotency_key,
        f.available_at, f.max_attempts,
        f.is_known
        and f.queue is not null
        and (f.available_at is not null or f.is_at_once)
        and _enqueue_fault(
            f.queue, f.kind, f.payload, f.idempotency_key, f.available_at,
            f.max_attempts
        ) is null
    from (
        select i.ordinality::integer as position,
            case when jsonb_typeof(i.value -> 'queue') = 'string'
                then i.value ->> 'queue'
            end as queue,
            case when jsonb_typeof(i.value -> 'kind') = 'string'
                then i.value ->> 'kind'
            end as kind,
            i.value -> 'payload' as payload,
            case when jsonb_typeof(i.value -> 'idempotency_key') = 'string'
                then i.value ->> 'idempotency_key'
            end as idempotency_key,
            case when jsonb_typeof(i.value -> 'available_at') = 'string'
                then _enqueue_instant(i.value ->> 'available_at')
            end as available_at,
            coalesce(i.value -> 'available_at', 'null') = 'null' as is_at_once,
            case
                when not i.value ? 'max_attempts'
                    then 3
                when i.value -> 'max_attempts' between '1' and '100'
                    and (i.value -> 'max_attempts')::numeric % 1 = 0
                    then (i.value -> 'max_attempts')::integer
            end as max_attempts,
            case when jsonb_typeof(i.value) = 'object'
                then i.value - array[
                    'queue', 'kind', 'payload', 'idempotency_key', 'available_at',
                    'max_attempts'
                ] = '{}'
                else false
            end as is_known
        from jsonb_array_elements(p_jobs) with ordinality as i
        offset 0
    ) as f
$$;
comment on function _enqueue_items(jsonb) is
'The items of enqueue_many in input order, typed strictly, and whether each is valid.';
-- 48 bits of milliseconds, the version, 12 bits of the rest of the millisecond, and
-- the variant and random half of a version 4 UUID.
create or replace function _enqueue_job_id(
    p_at timestamptz, p_random uuid default gen_random_uuid()
)
returns uuid
language sql volatile as $$
    select encode(
        int8send(
            (((date_part('epoch', p_at) * 1000000)::bigint / 1000) << 16)
            | (7 << 12)
            | ((date_part('epoch', p_at) * 1000000)::bigint % 1000 * 4096 / 1000)
        )
        || substr(uuid_send(p_random), 9),
        'hex'
    )::uuid
$$;
comment on function _enqueue_job_id(timestamptz, uuid) is
'A UUID version 7 of the given instant: ids sort by it down to a microsecond. Its '
'random half is that of a version 4 UUID.';
-- To an old snapshot a purged row may show beside this transaction's own, the newest.
-- Behind the fence only the key's own index serves. The planner inlines this.
create or replace function _enqueue_known_job(
    p_producer text, p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz, p_max_attempts integer
)
returns table (job_id uuid, is_same boolean)
language sql stable as $$
    select j.job_id,
        (j.queue, j.kind, j.payload, j.max_attempts)
        = (p_queue collate "C", p_kind collate "C", p_payload, p_max_attempts)
        and j.available_at is not distinct from p_available_at
    from (
        select i.*
        from job as i
        where i.producer = p_producer collate "C"
            and i.idempotency_key = p_idempotency_key collate "C"
        offset 0
    ) as j
    order by j.job_id desc
    limit 1
$$;
comment on function
_enqueue_known_job(text, text, text, jsonb, text, timestamptz, integer) is
'The job that has a key, and whether it was enqueued with the same intent.';
-- In the words of inspect_health. A finding that names one object comes first.
create or replace function _explain_damage(p_answer explained_job)
returns explained_job language plpgsql stable as $$
begin
    select 'instance_damaged', f.subject, concat(f.subject, ' ', f.detail),
        coalesce(f.remedy, h.remedy)
    into p_answer.reason, p_answer.who, p_answer.detail, p_answer.remedy
    from _health_part('objects') as f
    join health_finding as h on h.finding = f.finding
    where f.finding in ('object_changed', 'index_unusable')
        or (f.finding = 'grant_missing' and right(f.subject, 7) = '_worker')
    order by
        array_position(
            array['index_unusable', 'grant_missing', 'object_changed'], f.finding
        ), f.subject
    limit 1;
    return p_answer;
end;
$$;
comment on function _explain_damage(explained_job) is
'Adds what of the Instance''s objects is damaged; no reason while nothing is.';
-- A row that a transaction in progress has locked, changed or deleted names it in xmax.
create or replace function _explain_lock(p_answer explained_job, p_locker xid)
returns explained_job language plpgsql stable as $$
begin
    select w.reason, w.pid, s.owner, s.since,
        case
            when w.pid is null then concat(
                replace(s.remedy, 'rollback', 'commit'), ' keeps what it did, ',
                s.remedy, ' takes it back'
            )
            else format(
                'have session %s commit or roll back, or end it: %s', w.pid,
                coalesce(s.remedy, format('select pg_terminate_backend(%s)', w.pid))
            )
        end
    into p_answer.reason, p_answer.pid, p_answer.who, p_answer.since, p_answer.remedy
    from (
        select 'row_locked', coalesce(l.pid::text, l.virtualtransaction), l.pid, null
        from pg_locks as l
        where l.locktype = 'transactionid' and l.granted and l.transactionid = p_locker
        union all
        select 'table_locked', h.place, h.pid, h.locked
        from _session_locks() as h
        where case when p_locker is null then h.stops_reads else h.stops_claims end
    ) as w (reason, place, pid, locked)
    left join _session_list() as s on s.place = w.place
    where w.pid is distinct from pg_backend_pid()
    -- A session that has locked a table comes before one that waits to.
    order by w.reason, w.locked
    limit 1;
    if not found and _session_is_in_progress(p_locker) then
        p_answer.reason := 'row_locked';
    end if;
    return p_answer;
exception when insufficient_privilege then
    -- A DBA hides pg_locks or pg_stat_activity: inspect_health says so.
    return p_answer;
end;
$$;
comment on function _explain_lock(explained_job, xid) is
'Adds who holds the row, by the transaction that its xmax names, or a whole table.';
create or replace function _explain_queue(
    p_answer explained_job, p_available_at timestamptz, p_lease_owner text,
    p_lease_expires_at timestamptz
)
returns explained_job language plpgsql stable as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_front record;
begin
    if not exists (select from queue as q where q.queue = p_answer.queue) then
        p_answer.reason := 'queue_not_declared';
        return p_answer;
    end if;
    select 'queue_paused', q.paused_at, q.paused_by, 'lenso-jobs resume ' || q.queue
    into p_answer.reason, p_answer.since, p_answer.who, p_answer.remedy
    from queue as q
    where q.queue = p_answer.queue and q.paused_at is not null;
    if found then
        return p_answer;
    end if;
    p_answer.since := p_available_at;

    p_answer := _explain_damage(p_answer);
    if p_answer.reason is not null then
        return p_answer;
    end if;
    if p_lease_owner is null and p_available_at > v_now then
        p_answer.reason := case
            when p_answer.attempt = 0 or exists (
                select from attempt as a
                where a.job_id = p_answer.job_id
                    and a.attempt = p_answer.attempt
                    and a.outcome = 'released'
            ) then 'scheduled'
            else 'retry_waiting'
        end;
        p_answer.since := null;
        p_answer.until := p_available_at;
        return p_answer;
    end if;
    -- The job is never begun again, even if workers are connected.
    if p_answer.attempt >= p_answer.max_attempts then
        p_answer.reason := 'attempts_exhausted';
        p_answer.since := coalesce(p_lease_expires_at, p_available_at);
        p_answer.who := p_lease_owner;
        return p_answer;
    end if;
    if not exists (select from caller as c where c.is_worker) then
        p_answer.reason := 'no_declared_worker';
        return p_answer;
    end if;

    -- Each declared worker may have lost its role, or its membership.
    select 'role ' || min(w.caller), string_agg(w.fault, chr(10) order by w.fault),
        min(w.remedy)
    into p_answer.who, p_answer.detail, p_answer.remedy
    from (
        select c.caller, concat(f.subject, ' ', f.detail) as fault, f.remedy
        from caller as c
        left join _health_part('roles') as f
            on f.subject = c.caller
            and (
                f.finding = 'role_missing'
                or (f.finding = 'membership_missing' and right(f.detail, 7) = '_worker')
            )
        where c.is_worker
    ) as w
    having bool_and(w.remedy is not null);
    if found then
        p_answer.reason := 'instance_damaged';
        return p_answer;
    end if;

    select f.* into v_front from _queue_front(p_answer.queue, v_now) as f;
    -- A live lease in the queue proves that a worker is connected.
    if
        _session_waiting(p_answer.queue) = 0
        and (select sum(w.sessions) from _session_workers() as w) = 0
        and v_front.live = 0
    then
        p_answer.reason := 'no_worker_connected';
        p_answer.detail := _explain_silence(p_answer.queue);
        return p_answer;
    end if;

    select count(*) into p_answer.ahead
    from (
        select from live_job as l
        where l.queue = p_answer.queue
            and (l.available_at, l.job_id) < (p_available_at, p_answer.job_id)
            and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
        limit 10000
    ) as b;
    if p_lease_owner is not null then
        p_answer.reason := 'lease_expired';
        p_answer.since := p_lease_expires_at;
        p_answer.who := p_lease_owner;
    else
        p_answer.reason := 'ready';
    end if;
    if
        p_answer.since < v_now - interval '1 minute'
        and not exists (
            select
            from _queue_ends(v_now - interval '1 minute', 10000) as e
            where e.queue = p_answer.queue and e.leased_at > v_now - interval '1 minute'
        )
        and coalesce(v_front.last_claimed_at < v_now - interval '1 minute', true)
    then
        p_answer.reason := 'queue_silent';
        p_answer.detail := _explain_silence(p_answer.queue);
    end if;
    return p_answer;
end;
$$;
comment on function _explain_queue(explained_job, timestamptz, text, timestamptz) is
'Adds why a job without a live lease is not claimed yet.';
create or replace function _explain_row(p_answer explained_job)
returns explained_job language plpgsql stable as $$
declare
    v_now    timestamptz := clock_timestamp();
    v_job    record;
    v_status text;
begin
    select j.queue::text, l.xmax as locker, l.job_id is not null as is_live,
        coalesce(l.attempt, a.attempt) as attempt,
        coalesce(l.max_attempts, a.max_attempts, j.max_attempts) as max_attempts,
        coalesce(l.last_failure_code, a.failure_code)::text as failure_code,
        l.lease_owner::text, l.leased_at::timestamptz, l.lease_expires_at,
        l.available_at, a.worker::text, a.outcome, a.ended_at::timestamptz,
        'application_name of its session: ' || l.holder as holder
    into v_job
    from job as j
    left join live_job as l on l.job_id = j.job_id
    left join lateral (
        select e.*
        from attempt as e
        where e.job_id = j.job_id
        order by e.attempt desc
        limit 1
    ) as a on true
    where j.job_id = p_answer.job_id;
    if not found then
        p_answer.reason := 'purged_or_unknown';
        -- The first 48 bits of a job's id are the milliseconds since 1970.
        if substr(p_answer.job_id::text, 15, 1) = '7' then
            p_answer.since := timestamptz 'epoch' + interval '1 millisecond' * (
                'x' || left(replace(p_answer.job_id::text, '-', ''), 12)
            )::bit(48)::bigint;
        end if;
        select o.before, o.operator
        into p_answer.until, p_answer.who
        from (
            select a.operator_act_id, a.operator::text,
                -- A cast that a filter protects may be reached before the filter.
                case
                    when a.act = 'purge' and a.job_count > 0
                        then (a.arguments ->> 'before')::timestamptz
                    when a.act = 'erase'
                        and a.arguments ->> 'job_id' = p_answer.job_id::text
                        then a.acted_at
                end as before
            from operator_act as a
        ) as o
        where o.before > p_answer.since
        order by o.operator_act_id desc
        limit 1;
        return p_answer;
    end if;

    p_answer.queue := v_job.queue;
    p_answer.attempt := v_job.attempt;
    p_answer.max_attempts := v_job.max_attempts;
    p_answer.failure_code := v_job.failure_code;
    v_status := _status(
        v_job.is_live, v_job.lease_owner is not null, v_job.outcome, v_job.failure_code
    );
    if not v_job.is_live then
        p_answer.reason
        := case v_status when 'lost' then 'evidence_missing' else v_status end;
        p_answer.since := v_job.ended_at;
        p_answer.who := v_job.worker;
        if v_status = 'lost' then
            p_answer.remedy := format(
                'enqueue it again under a new key; or, as the owner: insert into '
                '%1$I.live_job (job_id, available_at, attempt, max_attempts, queue, '
                'payload_bytes) select job_id, clock_timestamp(), %2$s, '
                'greatest(max_attempts, %2$s + 1), queue, '
                'pg_column_size(payload || ''{}'') from %1$I.job where job_id = %3$L',
                -- A worker may have held it as it was deleted: no token is given twice.
                current_schema(), coalesce(v_job.attempt, 0) + 1, p_answer.job_id
            );
        end if;
        return p_answer;
    end if;
    p_answer := _explain_lock(p_answer, v_job.locker);
    if p_answer.reason is null and v_job.lease_expires_at > v_now then
        p_answer.reason := 'leased';
        p_answer.since := v_job.leased_at;
        p_answer.until := v_job.lease_expires_at;
        p_answer.who := v_job.lease_owner;
        p_answer.detail := v_job.holder;
        if v_job.leased_at < v_now - interval '5 minutes' then
            p_answer.detail := concat_ws(
                chr(10), v_job.holder,
                format(
                    'its worker has renewed the lease for %s: its handler is slow, or '
                    'hangs',
                    date_trunc('second', v_now - v_job.leased_at)
                )
            );
        end if;
    elsif p_answer.reason is null then
        p_answer := _explain_queue(
            p_answer, v_job.available_at, v_job.lease_owner, v_job.lease_expires_at
        );
    end if;
    return p_answer;
end;
$$;
comment on function _explain_row(explained_job) is
'Adds why one job is not being claimed, where no table is locked or lost.';
-- What a person on call looks at when nothing is claimed: one line each.
create or replace function _explain_silence(p_queue text)
returns text language plpgsql stable as $$
declare
    v_now  timestamptz := clock_timestamp();
    v_text text;
begin
    with front as (select f.* from _queue_front(p_queue, v_now) as f),
    line (place, text) as (
        select 1,
            coalesce(
                'last claim of the queue: ' || greatest(
                    f.last_claimed_at,
                    (
                        select max(e.leased_at)
                        from (
                            select i.leased_at
                            from _queue_ends('-infinity', 10000) as i
                            where i.queue = p_queue
                            limit 100
                        ) as e
                    )
                ), 'no claim of the queue is on record'
            )
        from front as f
        union all
        select 2,
            'sessions that wait for the queue: '
            || coalesce(_session_waiting(p_queue)::text, 'hidden (pg_locks)')
        union all
        select 3,
            format(
                'sessions that may act as worker %s: %s', w.worker,
                coalesce(w.sessions::text, 'hidden (pg_stat_activity)')
            )
        from _session_workers() as w
        union all
        select 4,
            concat(
                'live leases in the queue: ', f.live,
                ', the oldest since ' || f.oldest_leased_at
            )
        from front as f
        union all
        select 5, concat_ws(' ', f.subject, f.detail) || ': ' || f.remedy
        from unnest(array['roles', 'settings']) as p (part)
        cross join lateral _health_part(p.part) as f
        where f.finding in ('setting_harmful', 'not_readable')
            or f.subject in (select c.caller from caller as c where c.is_worker)
        union all
        select 6, format('%s has %s = %s: %s', s.place, s.setting, s.value, s.remedy)
        from _session_settings() as s
        where not s.is_harmful
        union all
        select 7, format('role %s %s', r.rolname, b.detail)
        from caller as c
        join pg_roles as r on r.rolname = c.caller
        cross join lateral (
            values
                (
                    not exists (
                        select from pg_roles as o
                        where o.rolcanlogin
                            and not o.rolsuper
                            and pg_has_role(o.oid, r.oid, 'member')
                            and has_database_privilege(
                                o.oid, current_database(), 'connect'
                            )
                    ),
                    'cannot log in to this database, nor can a role that may act as it'
                ),
                (r.rolconnlimit = 0, 'has a connection limit of 0'),
                (
                    r.rolvaliduntil < clock_timestamp(),
                    'has a password that is valid no longer'
                )
        ) as b (is_so, detail)
        where c.is_worker and b.is_so
    )
    select string_agg(l.text, chr(10) order by l.place, l.text) into v_text
    from line as l;
    return v_text;
end;
$$;
comment on function _explain_silence(text) is
'What may keep the workers of a queue from claiming, one line each.';
create or replace function _health_counted(p_number bigint, p_noun text)
returns text language sql immutable as $$
    select p_number || ' ' || p_noun || case when p_number <> 1 then 's' else '' end
$$;
comment on function _health_counted(bigint, text) is
'A number and its noun: 1 job, 2 jobs.';
create or replace function _health_failures()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    -- So few make no finding, and the ends need not be read.
    if 5 > (
        select count(*)
        from (
            select from attempt as a
            where (a.outcome = 'failed' or a.failure_code = 'attempts_exhausted')
                and a.ended_at > v_now - interval '1 hour'
            limit 5
        ) as f
    ) then
        return;
    end if;

    return query
    -- Of each kind the last 1,000 ends of an hour: a share of so many does not flap.
    with ends as materialized (
        select
            e.*, j.kind::text as kind, row_number() over (
                partition by e.queue, j.kind order by e.ended_at desc
            ) as place
        from _queue_ends(v_now - interval '1 hour', 3000) as e
        -- The job's row is found by its key behind a fence.
        cross join lateral (
            select i.kind from job as i where i.job_id = e.job_id offset 0
        ) as j
        -- A job that was redriven has not failed. EXISTS might hash all live rows.
        where not (
            e.has_failed
            and (
                (select l.job_id from live_job as l where l.job_id = e.job_id)
                is not null
                or exists (
                    select from attempt as a
                    where a.job_id = e.job_id and a.ended_at > e.ended_at
                )
            )
        )
    ),
    judged (finding, queue, subject, since, failed, ended, code) as (
        select 'jobs_failing', e.queue, e.queue, min(e.ended_at),
            count(*) filter (where e.has_failed), count(*),
            mode() within group (order by e.failure_code) filter (where e.has_failed)
        from ends as e
        where e.ended_at > v_now - interval '5 minutes'
        group by e.queue
        having count(*) filter (where e.has_failed) >= greatest(20, count(*) / 2.0)
        union all
        select 'kind_failing', e.queue, format('kind %s of queue %s', e.kind, e.queue),
            min(e.ended_at), count(*) filter (where e.has_failed), count(*),
            mode() within group (order by e.failure_code) filter (where e.has_failed)
        from ends as e
        where e.place <= 1000
        group by e.queue, e.kind
        having
            count(*) >= 20
            and count(*) filter (where e.has_failed) >= greatest(5, count(*) / 10.0)
    )
    select j.finding, j.subject, j.since,
        format(
            'has %s among the last %s, most often %s', _health_counted(j.failed, 'failure'),
            _health_counted(j.ended, 'end'), j.code
        ), null::text
    from judged as j
    where j.finding = 'jobs_failing'
        or j.queue not in (
            select q.queue from judged as q where q.finding = 'jobs_failing'
        );
end;
$$;
comment on function _health_failures() is
'Queues and kinds of which many jobs have failed of late, for inspect_health.';
create or replace function _health_history()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
declare
    v_newest timestamptz := greatest(
        (select j.created_at::timestamptz from job as j order by j.job_id desc limit 1),
        (select e.ended_at from _queue_ends('-infinity', 1) as e)
    );
    v_oldest timestamptz := (
        select a.ended_at::timestamptz
        from attempt as a
        where a.outcome in ('succeeded', 'failed')
            or a.failure_code = 'attempts_exhausted'
        order by a.ended_at
        limit 1
    );
    v_keep   interval := (
        select make_interval(secs => i.retention_seconds) from instance as i
    );
begin
    if not exists (select from instance) then
        return query select
            'not_configured', 'instance', null::timestamptz,
            'holds no configuration', 'lenso-jobs configure';
    end if;
    if not _policy_is_published() then
        return query select
            'not_configured', 'the row of instance', null::timestamptz,
            'does not repeat the tables queue and caller',
            format('update %I.queue set queue = queue', current_schema());
    end if;
    -- The clock of a server that took over may be a little behind.
    if v_newest > clock_timestamp() + interval '1 second' then
        return query select
            'clock_went_back', 'the server''s clock', v_newest,
            'is behind what is on record by ' || (v_newest - clock_timestamp()),
            null::text;
    end if;
    if v_oldest < clock_timestamp() - v_keep * 1.1 - interval '1 hour' then
        return query select
            'retention_overdue', 'the oldest evidence', v_oldest,
            'is to be kept for ' || v_keep, 'lenso-jobs purge --retention --yes';
    end if;

    -- Logical replication and a dump of the rows alone leave the sequence behind. Looked
    -- for in the Instance's schema alone: the caller's own temporary relations come
    -- after it.
    if to_regclass(
        format('%I.operator_act_operator_act_id_seq', current_schema())
    ) is not null then
        return query
        select 'sequence_behind', 'sequence operator_act_operator_act_id_seq',
            null::timestamptz, 'gives a number that is taken: every operator act fails',
            format(
                'select setval(%L, %s)',
                current_schema() || '.operator_act_operator_act_id_seq', a.newest
            )
        from operator_act_operator_act_id_seq as s
        cross join (select max(o.operator_act_id) from operator_act as o) as a (newest)
        where a.newest > case when s.is_called then s.last_value else 0 end;
    end if;

    -- The tables of the migration tool, if that was used.
    if to_regclass(format('%I.yoyo_lock', current_schema())) is not null then
        return query
        select 'migration_unfinished', 'yoyo_lock', y.ctime::timestamptz,
            'was taken by process ' || y.pid, null::text
        from yoyo_lock as y;
    end if;
    if to_regclass(format('%I._yoyo_migration', current_schema())) is not null then
        return query
        select 'migration_unfinished', 'installed_version', null::timestamptz,
            format('is %s, and the last migration on record is %s', v.version, m.version),
            'lenso-jobs upgrade'
        from installed_version as v
        cross join (
            select max(substring(y.migration_id from '^[0-9]+')::integer)
            from _yoyo_migration as y
        ) as m (version)
        where v.version <> m.version;
    end if;
end;
$$;
comment on function _health_history() is
'Configuration, clock, retention and migrations, for inspect_health.';
create or replace function _health_objects(p_schema text)
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable
set quote_all_identifiers = off
set enable_hashjoin = on
set enable_sort = on
as $$
begin
    return query
    select 'object_changed', 'queue ' || q.queue, null::timestamptz,
        'has a claim floor of which a sequence is missing or altered: its claims are '
        'slow, or fail', format('select %I._claim_floors_made()', p_schema)
    from queue as q
    where q.floor is not null and not _claim_floor_is_whole(q.floor);
    -- Where nobody has changed an object since, there is nothing to find.
    if p_schema = current_schema() and exists (
        select from installed_digest as d where d.fingerprint = _catalogue_fingerprint()
    ) then
        return;
    end if;

    return query
    with home as (
        select n.nspname::text as name, pg_get_userbyid(n.nspowner)::text as owner,
            left(pg_get_userbyid(n.nspowner), -5) as prefix
        from pg_namespace as n
        where n.nspname = p_schema
    ),
    object as materialized (
        select o.* from home as h cross join _catalogue_objects(h.name) as o
    ),
    -- A group whose role is missing may have been renamed: it keeps what it holds.
    due as (
        select coalesce(nullif(g.object, 'schema'), 'schema ' || h.name) as object,
            coalesce(substring(g.object from ' (.*)$'), 'the schema') as label,
            g.privilege, quote_ident(h.prefix || g.role_kind) as grantee,
            r.rolname is null as is_lost
        from home as h
        cross join _catalogue_grants() as g
        left join pg_roles as r on r.rolname = h.prefix || g.role_kind
    ),
    given as (
        select g.*, m[1] as grantee, m[2] as privilege, m[3] is not null as is_passable,
            format(' (%I)', o.facts ->> 'column') as of_column, o.kind = 'column' as is_column
        from home as h
        cross join object as o
        left join object as t
            on o.kind = 'column' and t.name = o.facts ->> 'table'
            and t.kind in ('table', 'view')
        cross join lateral (
            select o.kind || ' ' || o.name, o.facts ->> 'place', w.word,
                case
                    when o.kind = 'schema' then 'the schema'
                    when o.kind in ('type', 'domain') then 'type ' || o.name
                    else o.name
                end
            from jsonb_array_elements_text(o.facts -> 'grants') as w (word)
            union all
            select 'type ' || o.name, format('type %I.%I', h.name, o.name), w.word,
                'type ' || o.name
            from jsonb_array_elements_text(o.facts -> 'type grants') as w (word)
        ) as g (object, place, word, label)
        cross join regexp_match(g.word, '^(.*) ([A-Z]+)( with grant option)?$') as m
        -- What is not the owner's is another finding, and a DBA's own table is none.
        where coalesce(t.facts, o.facts) ->> 'owner' = h.owner
            and not starts_with(g.word, quote_ident(h.owner) || ' ')
            and (
                o.kind in ('schema', 'migration table', 'type', 'domain')
                or (o.kind = 'function' and o.name ~ '^(_|configure[(])')
                or (o.kind = 'sequence' and starts_with(o.name, 'claim_floor_'))
                or coalesce(o.facts ->> 'table', o.name) = any(_catalogue_tables())
                or format(
                    '%s %s', coalesce(t.kind, o.kind), coalesce(t.name, o.name)
                ) in (select l.object from due as l)
            )
    )
    select
        'object_changed', 'objects', null::timestamptz, 'differ from what was installed',
        'lenso-jobs check'
    where (
        select
            encode(
                sha256(convert_to(string_agg(d.text, ', ' order by d.text), 'UTF8')), 'hex'
            )
        from home as h
        cross join object as o
        cross join lateral (
            select _catalogue_digested(o.kind, o.name, o.facts, h.owner) collate "C"
        ) as d (text)
    ) is distinct from (select d.digest from installed_digest as d)
    union all
    select 'index_unusable', 'index ' || i.name, null,
        case
            when o.name is null then 'is missing'
            when not (o.facts -> 'valid')::boolean
                then 'is not valid: it is being built, or its building was cut off'
            else 'is not as it was installed'
        end, null
    from (
        values
            ('live_job_claimable_idx', 'live_job',
            'btree (queue, available_at, job_id) WHERE (queue IS NOT NULL)'),
            ('attempt_ended_at_idx', 'attempt',
            'btree (ended_at) WHERE (((outcome)::text = ANY (ARRAY[''succeeded''::text, '
            '''failed''::text])) OR (failure_code = ''attempts_exhausted''::text))'),
            ('attempt_failed_idx', 'attempt',
            'btree (ended_at, job_id) WHERE (((outcome)::text = ''failed''::text) OR '
            '(failure_code = ''attempts_exhausted''::text))'),
            ('attempt_failed_of_queue_idx', 'attempt',
            'btree (queue, ended_at, job_id) WHERE (((outcome)::text = ''failed''::text) '
            'OR (failure_code = ''attempts_exhausted''::text))')
    ) as i (name, of_table, definition)
    -- That of another table does not count, though it may be in the way.
    left join object as o
        on o.kind = 'index' and o.name = i.name and o.facts ->> 'of' = i.of_table
    where
        (
            (o.facts -> 'valid')::boolean
            and split_part(o.facts ->> 'definition', ' USING ', 2) = i.definition
        ) is not true
    union all
    select
        'grant_stray', format('%s on %s to %s', lower(g.privilege), g.label, g.grantee),
        null, 'is not part of the Instance',
        format(
            'revoke %s%s%s on %s from %s cascade',
            case when g.is_passable and d.object is not null then 'grant option for ' end,
            lower(g.privilege), case when g.is_column then g.of_column end, g.place,
            g.grantee
        )
    from given as g
    left join due as d
        on (d.object, d.privilege, d.grantee) = (g.object, g.privilege, g.grantee)
    where (d.object is null or g.is_passable)
        and not exists (
            select from due as l
            where l.is_lost and (l.object, l.privilege) = (g.object, g.privilege)
        )
    union all
    -- Of a role that is missing _health_roles says so.
    select 'grant_missing', format('%s on %s to %s', lower(d.privilege), d.label, d.grantee),
        null,
        case when o.name is null then 'is missing with its object' else 'is missing' end,
        format('grant %s on ', lower(d.privilege)) || (o.facts ->> 'place')
        || ' to ' || d.grantee
    from due as d
    left join object as o on o.kind || ' ' || o.name = d.object
    where not d.is_lost
        and (
            o.facts -> 'grants' ?| array[
                d.grantee || ' ' || d.privilege,
                d.grantee || ' ' || d.privilege || ' with grant option'
            ]
        ) is not true;
end;
$$;
comment on function _health_objects(text) is
'Objects that differ from what was installed, unusable indexes, and rights that '
'_catalogue_grants does not list or that a group does not have, for inspect_health and '
'check.';
-- A DBA may hide a view of the catalogue, and a function of the Instance may be gone.
-- One part that fails must not hide what the others find.
create or replace function _health_part(p_part text)
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
begin
    case p_part
        when 'sessions' then return query select f.* from _health_sessions() as f;
        when 'objects' then
            return query select f.* from _health_objects(current_schema()::text) as f;
        when 'roles' then return query select f.* from _health_roles() as f;
        when 'settings' then return query select f.* from _health_settings() as f;
        when 'history' then return query select f.* from _health_history() as f;
        when 'queues' then return query select f.* from _health_queues() as f;
        when 'failures' then return query select f.* from _health_failures() as f;
        when 'rows' then return query select f.* from _health_rows() as f;
        when 'storage' then return query select f.* from _health_storage() as f;
        when 'server' then return query select f.* from _health_server() as f;
    end case;
exception
when undefined_table or undefined_column or undefined_function then
    return query
    select
        'object_changed', 'objects', null::timestamptz, 'cannot be read: ' || sqlerrm,
        'lenso-jobs check';
when others then
    return query
    select 'not_readable', p_part, null::timestamptz, 'cannot be read: ' || sqlerrm, null;
end;
$$;
comment on function _health_part(text) is
'What is wrong with one part of the Instance, for inspect_health; that it cannot be '
'read where that fails.';
create or replace function _health_queues()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
declare
    v_queues inspected_queue[] := array(select q from inspect_queues() as q);
    v_now    timestamptz       := clock_timestamp();
begin
    return query
    with seen as (
        select q.*, v_now - q.oldest_ready_age as ready_since,
            q.last_claimed_at > v_now + interval '1 second' as is_ahead,
            -- One that lies ahead tells nothing of what was claimed since.
            q.last_claimed_at between v_now - interval '1 minute'
            and v_now + interval '1 minute' as is_moving
        from unnest(v_queues) as q
    )
    select case when q.is_moving then 'queue_behind' else 'queue_silent' end,
        q.queue, q.ready_since,
        format(
            'has %s ready, the oldest for %s', _health_counted(q.ready, 'job'),
            date_trunc('second', q.oldest_ready_age)
        ),
        'lenso-jobs explain ' || (
            select l.job_id
            from live_job as l
            where l.queue = q.queue and l.lease_owner is null
            order by l.available_at, l.job_id
            limit 1
        )
    from seen as q
    where q.is_declared
        and q.paused_at is null
        and q.oldest_ready_age
        > case when q.is_moving then interval '10 minutes' else interval '1 minute' end
    union all
    select 'queue_paused', q.queue, q.paused_at,
        format(
            'was paused by %s and has %s ready',
            (select p.paused_by from queue as p where p.queue = q.queue),
            _health_counted(q.ready, 'job')
        ), 'lenso-jobs resume ' || q.queue
    from seen as q
    where q.paused_at is not null
    union all
    select 'clock_went_back', q.queue, q.last_claimed_at,
        'has a claim that lies ahead of the server''s clock', null
    from seen as q
    where q.is_ahead
    union all
    select 'queue_undeclared', q.queue, null,
        format(
            'is not declared and has %s',
            _health_counted(
                q.ready + q.scheduled + q.retry_waiting + q.running + q.expired,
                'live job'
            )
        ), null
    from seen as q
    where not q.is_declared
    union all
    select 'leases_expired', q.queue, q.oldest_lapse_at,
        format('has %s that ran out', _health_counted(q.expired, 'lease')), null
    from seen as q
    where q.oldest_lapse_at < v_now - interval '1 minute' and q.paused_at is null
    union all
    select 'lease_broken', q.queue, null::timestamptz,
        format('has %s with half a lease', _health_counted(q.broken, 'live job')),
        -- A lease that has run out is taken or ended by the next claim.
        format(
            'update %1$I.live_job set leased_at = coalesce(leased_at, clock_timestamp())'
            ', lease_expires_at = clock_timestamp(), lease_owner = coalesce(lease_owner, '
            '''unknown''), lease_token_hash = coalesce(lease_token_hash, sha256('''')) '
            'where queue = %2$L and %1$I._lease_is_broken(leased_at, lease_expires_at, '
            'lease_owner, lease_token_hash)',
            current_schema(), q.queue
        )
    from seen as q
    where q.broken > 0
    union all
    select 'lease_held_long', q.queue, q.oldest_leased_at,
        concat(
            'has a lease that has been renewed for ',
            date_trunc('second', v_now - q.oldest_leased_at),
            ', held by ' || h.lease_owner, ' in ' || h.holder
        ), 'lenso-jobs explain ' || h.job_id
    from seen as q
    cross join instance as i
    left join lateral (
        select f.job_id, f.lease_owner, f.holder
        from (
            select l.*
            from live_job as l
            where l.queue = q.queue and l.available_at <= v_now
            order by l.available_at, l.job_id
            limit 10000
        ) as f
        where f.leased_at = q.oldest_leased_at
        limit 1
    ) as h on true
    where
        q.oldest_leased_at < v_now - greatest(
            make_interval(secs => 100 * i.lease_seconds), interval '1 day'
        )
    union all
    select 'jobs_far_ahead', q.queue, null,
        format(
            'has %s due in more than ten years, the last at %s',
            _health_counted(f.number, 'job'), f.latest
        ), 'lenso-jobs explain ' || f.job_id
    from seen as q
    cross join lateral (
        select count(*) as number, max(l.available_at) as latest,
            (array_agg(l.job_id))[1] as job_id
        from (
            select r.available_at, r.job_id
            from live_job as r
            where r.queue = q.queue
                and r.available_at > v_now + interval '10 years'
            order by r.available_at desc, r.job_id desc
            limit 10000
        ) as l
    ) as f
    where f.number > 0;
end;
$$;
comment on function _health_queues() is
'Queues that stand still, lag, are paused or not declared, leases that are broken or '
'held long, and jobs that are due in more than ten years, for inspect_health.';
create or replace function _health_roles()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with home as (
        select n.nspowner, pg_get_userbyid(n.nspowner)::text as owner,
            substring(pg_get_userbyid(n.nspowner) from '^(.*)_owner$') as prefix
        from pg_namespace as n
        where n.nspname = current_schema()
    ),
    team as (
        select g.kind, h.prefix || '_' || g.kind as name, g.verb, r.oid,
            r.rolsuper, r.rolcanlogin
        from home as h
        cross join (
            values
                ('owner', null), ('producer', 'enqueue'), ('worker', 'claim'),
                ('observer', 'inspect_health'), ('operator', 'redrive')
        ) as g (kind, verb)
        left join pg_roles as r on r.rolname = h.prefix || '_' || g.kind
        where h.prefix is not null
    ),
    -- A renamed role keeps what it was granted.
    holder as (
        select p.proname, r.rolname
        from home as h
        join pg_proc as p on p.proowner = h.nspowner
        cross join aclexplode(p.proacl) as a
        join pg_roles as r on r.oid = a.grantee
        where r.oid <> p.proowner
    ),
    actor as (
        select c.*, r.oid, r.rolsuper
        from caller as c
        left join pg_roles as r on r.rolname = c.caller
    ),
    declared as (
        select a.caller, a.oid, g.kind, t.oid as team, t.name
        from actor as a
        cross join lateral (
            values
                ('producer', a.is_producer), ('worker', a.is_worker),
                ('observer', a.is_observer)
        ) as g (kind, is_meant)
        left join team as t on t.kind = g.kind
        where g.is_meant
    ),
    -- From 16 on the maker of a role administers it, without inheriting anything.
    membership as (
        select
            m.roleid, g.rolname as of, m.member as oid, r.rolname::text as member, t.kind,
            coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, r.rolinherit)
            as is_inherited,
            format(
                'revoke %I from %I%s', g.rolname, r.rolname,
                case
                    when current_setting('server_version_num')::integer >= 160000
                        then format(' granted by %I', pg_get_userbyid(m.grantor))
                end
            ) as undone
        from pg_auth_members as m
        join pg_roles as g on g.oid = m.roleid
        join pg_roles as r on r.oid = m.member
        left join team as t on t.oid = m.roleid
    )
    select
        'role_missing', t.name, null::timestamptz, 'is a group role and does not exist',
        coalesce(
            (
                select format('alter role %I rename to %I', min(h.rolname), t.name)
                from holder as h
                where h.proname = t.verb
                    and h.rolname not in (select o.name from team as o)
                having count(distinct h.rolname) = 1
            ), 'lenso-jobs setup'
        )
    from team as t
    where t.oid is null
    union all
    select f.*
    from home as h
    left join lateral (
        select left(min(g.rolname), -8) || 'owner' as name
        from holder as g
        where g.proname = 'enqueue' and right(g.rolname, 9) = '_producer'
        having count(distinct g.rolname) = 1
    ) as o on true
    left join pg_roles as r on r.rolname = o.name
    cross join lateral (
        select 'role_missing', h.owner, null::timestamptz,
            'owns the Instance and is not named ' || o.name,
            'alter role ' || quote_ident(h.owner) || ' rename to ' || quote_ident(o.name)
        where r.oid is null
        union all
        -- It was not renamed: the Instance was given to another role.
        select 'object_changed', 'schema ' || current_schema(), null,
            format('belongs to %s, not to %s', h.owner, o.name), 'lenso-jobs check'
        where r.oid is not null
    ) as f
    where h.prefix is null
    union all
    select 'role_missing', a.caller, null, 'is a declared caller and does not exist',
        format(
            'if it was renamed: alter role NEW_NAME rename to %I; if it was dropped: '
            'lenso-jobs setup', a.caller
        )
    from actor as a
    where a.oid is null
    union all
    select 'membership_missing', d.caller, null, 'is not a member of ' || d.name,
        -- Before 16 this is the role's own.
        case
            when exists (
                select from membership as m
                where m.undone !~ ' granted by ' and (m.oid, m.roleid) = (d.oid, d.team)
            ) then format('alter role %I inherit', d.caller)
            else 'lenso-jobs configure'
        end
    from declared as d
    where d.oid is not null and d.team is not null
        and not exists (
            select from membership as m
            where m.is_inherited and (m.oid, m.roleid) = (d.oid, d.team)
        )
    union all
    select 'membership_stray', m.member, null,
        'is a member of ' || m.of || ' and not declared',
        coalesce(
            (
                select
                    format(
                        'if it is %s under a new name, rename it back; else ',
                        string_agg(quote_ident(d.caller), ' or ' order by d.caller)
                    )
                from declared as d
                where d.kind = m.kind and d.oid is null
                having count(*) > 0
            ), ''
        ) || m.undone
    from membership as m
    cross join home as h
    where m.is_inherited and m.kind in ('producer', 'worker', 'observer')
        and not exists (
            select from declared as d where (d.caller, d.kind) = (m.member, m.kind)
        )
        and m.member not in (select t.name from team as t)
        -- The role that set the Instance up may have to hand out the groups.
        and not (
            pg_has_role(m.oid, h.nspowner, 'member')
            and m.member not in (select a.caller from actor as a)
        )
    union all
    select 'membership_stray', m.member, null,
        'is a member of ' || m.of || ' and could not have set the Instance up', m.undone
    from membership as m
    where m.is_inherited and m.kind = 'owner'
        and m.member not in (select t.name from team as t)
        and m.member not in (select a.caller from actor as a)
        and not has_database_privilege(m.oid, current_database(), 'create')
    union all
    select
        'role_unsafe', t.name, null, p.detail, format('alter role %I %s', t.name, p.change)
    from team as t
    cross join lateral (
        values
            (t.rolsuper, 'is a superuser', 'nosuperuser'),
            (t.rolcanlogin, 'can log in', 'nologin')
    ) as p (is_so, detail, change)
    where p.is_so
    union all
    -- The owner may see since when the transactions of other roles are open.
    select 'role_unsafe', t.name, null, 'is a member of ' || m.of, m.undone
    from team as t
    join membership as m on m.oid = t.oid
    where not (t.kind = 'owner' and m.of = 'pg_read_all_stats')
    union all
    select 'role_unsafe', a.caller, null, 'is a caller and a superuser',
        format('alter role %I nosuperuser', a.caller)
    from actor as a
    where a.rolsuper
    union all
    -- Members of the last three read, write or lock every table.
    select 'role_unsafe', a.caller, null,
        concat(
            'is a caller and a member of ', m.of,
            ' through ' || nullif(m.member, a.caller)
        ), m.undone
    from actor as a
    join membership as m on pg_has_role(a.oid, m.oid, 'member')
    where not a.rolsuper
        and (
            m.kind in ('owner', 'operator')
            or m.of in ('pg_read_all_data', 'pg_write_all_data', 'pg_maintain')
        )
    union all
    select distinct 'role_unsafe', t.name, null::timestamptz,
        'owns something or has a right in ' || case d.datname
            when current_database() then format('schema %I', n.nspname)
            else format('database %I', d.datname)
        end,
        'if another Instance is there, set role_prefix in the document; else revoke it there'
    from team as t
    cross join home as h
    join pg_shdepend as s
        on s.refclassid = 'pg_authid'::regclass and s.refobjid = t.oid
    join pg_database as d on d.oid = s.dbid
    left join pg_namespace as n
        on d.datname = current_database()
        and s.classid = 'pg_namespace'::regclass and n.oid = s.objid
    where case d.datname
        when current_database() then n.nspowner <> h.nspowner
        else not d.datistemplate
    end
$$;
comment on function _health_roles() is
'Missing roles, memberships that are missing or not declared, and roles that can do '
'more than they should, for inspect_health and check.';
-- Rows are written and deleted together by the functions. Where they disagree somebody
-- changed them by hand, or put a table in the place of another. Lost jobs are new at
-- first; purge, which goes by attempts, leaves them behind as the oldest.
create or replace function _health_rows()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with kept as (
        (select j.job_id from job as j order by j.job_id limit 500)
        union
        (select j.job_id from job as j order by j.job_id desc limit 2000)
    ),
    live as (
        (select l.job_id from live_job as l order by l.job_id limit 500)
        union
        (select l.job_id from live_job as l order by l.job_id desc limit 2000)
    )
    select 'job_lost', 'job ' || min(k.job_id::text), null::timestamptz,
        concat(
            'and at least ' || _health_counted(nullif(count(*) - 1, 0), 'other') || ' ',
            case count(*) when 1 then 'is' else 'are' end, ' neither live nor ended'
        ), 'lenso-jobs explain ' || min(k.job_id::text)
    from kept as k
    left join lateral (
        select a.outcome, a.failure_code
        from attempt as a
        where a.job_id = k.job_id
        order by a.attempt desc
        limit 1
    ) as a on true
    where _status(false, false, a.outcome, a.failure_code) = 'lost'
        and not exists (select from live_job as l where l.job_id = k.job_id)
    having count(*) > 0
    union all
    select 'live_row_stray', 'live row ' || min(v.job_id::text), null,
        concat(
            'and at least ' || _health_counted(nullif(count(*) - 1, 0), 'other') || ' ',
            case count(*) when 1 then 'has' else 'have' end, ' no job'
        ),
        format(
            'restore the rows of job from a backup; or, and it deletes data: delete from '
            '%1$I.live_job as l where not exists (select from %1$I.job as j where '
            'j.job_id = l.job_id)', current_schema()
        )
    from live as v
    where not exists (select from job as j where j.job_id = v.job_id)
    having count(*) > 0
$$;
comment on function _health_rows() is
'Jobs that were lost and live rows without a job, among the 2,000 newest and the 500 '
'oldest rows, for inspect_health.';
create or replace function _health_server()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    select 'notify_queue_filling', 'the server''s queue of notifications',
        null::timestamptz, format('is %s %% full', round(u.usage::numeric * 100)), null
    from pg_notification_queue_usage() as u (usage)
    where u.usage > 0.25
    union all
    -- What superusers and pg_use_reserved_connections keep is not for callers.
    select 'connections_scarce', 'the server', null,
        format(
            'has %s of %s connections in use, and keeps %s of them for superusers',
            u.number, l.number, l.kept
        ), null
    from (
        select count(*) from pg_stat_activity as a where a.usesysid is not null
    ) as u (number)
    cross join (
        select current_setting('max_connections')::integer,
            current_setting('superuser_reserved_connections')::integer
            + coalesce(current_setting('reserved_connections', true), '0')::integer
    ) as l (number, kept)
    where u.number >= 0.9 * (l.number - l.kept)
    union all
    select 'connections_scarce', 'database ' || d.datname, null,
        format('has %s of %s connections in use', u.number, d.datconnlimit),
        format('alter database %I connection limit -1', d.datname)
    from pg_database as d
    cross join lateral (
        select count(*) from pg_stat_activity as a
        where a.datid = d.oid and a.usesysid is not null
    ) as u (number)
    where d.datname = current_database()
        and d.datconnlimit >= 0 and u.number >= 0.9 * d.datconnlimit
    union all
    select 'slot_keeps_wal', 'replication slot ' || s.slot_name, null,
        format(
            'is %s and keeps %s of WAL',
            case when s.active then 'active' else 'not active' end, pg_size_pretty(s.kept)
        ),
        case
            when not s.active
                then format('select pg_drop_replication_slot(%L)', s.slot_name)
        end
    from (
        select r.*,
            pg_wal_lsn_diff(
                case
                    when pg_is_in_recovery() then pg_last_wal_replay_lsn()
                    else pg_current_wal_lsn()
                end, r.restart_lsn
            ) as kept
        from pg_replication_slots as r
    ) as s
    where s.wal_status in ('extended', 'unreserved')
        or s.kept > case when s.active then 10 else 1 end * 1024 ^ 3
    union all
    select 'slot_invalid', 'replication slot ' || s.slot_name, null,
        'was invalidated, and nobody can read from it',
        format('select pg_drop_replication_slot(%L)', s.slot_name)
    from pg_replication_slots as s
    where s.wal_status = 'lost' or to_jsonb(s) ->> 'invalidation_reason' is not null
$$;
comment on function _health_server() is
'What the whole server runs out of, for inspect_health.';
create or replace function _health_sessions()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with seen as (
        select s.*, h.place is not null as is_writing, h.locked,
            clock_timestamp() - s.since as age,
            format(
                '(%s, %s)',
                -- A slot has no session, and no role.
                case
                    when s.place is null then s.owner
                    else coalesce('role ' || s.owner, 'of an unknown role')
                end,
                -- Where the time is hidden the age in transactions must do.
                case
                    when s.since is not null
                        then 'open for '
                        || date_trunc('second', clock_timestamp() - s.since)
                    when coalesce(s.xmin, s.xid) is null then 'since when is hidden'
                    else age(coalesce(s.xmin, s.xid)) || ' transactions old'
                end
            ) as facts
        from _session_list() as s
        left join _session_locks() as h on h.place = s.place
    )
    select 'table_locked', s.name, s.since, concat_ws(' ', s.locked, s.facts), s.remedy
    from seen as s
    where s.locked is not null
    union all
    select 'transaction_open', s.name, s.since,
        'wrote to this Instance and has not ended ' || s.facts, s.remedy
    from seen as s
    where s.is_writing
        and s.locked is null
        and coalesce(s.age > interval '1 minute', age(s.xid) > 1000)
    union all
    select
        'snapshot_held', s.name, s.since, 'holds an old snapshot ' || s.facts, s.remedy
    from seen as s
    where s.xmin is not null
        -- Standbys tell of theirs every ten seconds, many transactions late.
        and coalesce(
            s.age > interval '5 minutes',
            age(s.xmin) > case when s.is_remote then 100000 else 5000 end
        )
$$;
comment on function _health_sessions() is
'Locked tables, open transactions and old snapshots, for inspect_health.';
create or replace function _health_settings()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    select 'setting_harmful', s.place, null::timestamptz,
        format(
            'has %s = %s; open sessions keep it: have them reconnect', s.setting, s.value
        ), s.remedy
    from _session_settings() as s
    where s.is_harmful
$$;
comment on function _health_settings() is
'Settings that make the calls of declared callers fail, for inspect_health.';
create or replace function _health_storage()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    with kept as (
        select c.relname::text as name, s.last_autovacuum, s.n_live_tup, s.n_dead_tup,
            format('%I.%I', s.schemaname, c.relname) as place,
            pg_relation_size(c.oid) as size,
            exists (
                select from pg_options_to_table(c.reloptions) as o
                -- A cast that a filter protects may be reached before the filter.
                where case
                    when o.option_name = 'autovacuum_enabled'
                        then not o.option_value::boolean
                end
            ) as is_left_out
        from pg_class as c
        join pg_stat_user_tables as s on s.relid = c.oid
        where c.oid in ('job'::regclass, 'live_job'::regclass, 'attempt'::regclass)
    )
    select 'autovacuum_off', v.subject, null::timestamptz, 'is off',
        format('set %s to on in the server''s configuration, and reload that', v.subject)
    from unnest(array['autovacuum', 'track_counts']) as v (subject)
    where current_setting(v.subject) = 'off'
    union all
    select 'autovacuum_off', k.name, null, 'has autovacuum_enabled off',
        format('alter table %s reset (autovacuum_enabled)', k.place)
    from kept as k
    where k.is_left_out
    union all
    -- live_job asks for it at 2,000 dead rows, the others at a fifth of the table.
    select 'autovacuum_behind', k.name, k.last_autovacuum,
        format('has %s dead rows and %s live ones', k.n_dead_tup, k.n_live_tup), null
    from kept as k
    where k.n_dead_tup
        > 50000 + case k.name when 'live_job' then 0 else k.n_live_tup / 2 end
    union all
    select 'table_bloated', k.name, null,
        format('takes %s for %s live rows', pg_size_pretty(k.size), k.n_live_tup), null
    from kept as k
    where k.name = 'live_job' and k.size > 268435456 + 10000 * k.n_live_tup
$$;
comment on function _health_storage() is 'Vacuum and bloat, for inspect_health.';
-- Inlined by each statement that reads it.
create or replace function _inspect_row(p_job_id uuid)
returns setof inspected_job
language sql stable as $$
    select j.job_id,
        j.queue,
        j.kind,
        _status(
            l.job_id is not null, l.lease_owner is not null, a.outcome, a.failure_code
        ),
        coalesce(l.attempt, a.attempt, 0),
        coalesce(l.max_attempts, a.max_attempts, j.max_attempts),
        coalesce(l.available_at, greatest(j.available_at, j.created_at))::timestamptz,
        l.lease_expires_at::timestamptz,
        coalesce(l.last_failure_code, f.failure_code),
        j.created_at::timestamptz,
        greatest(j.created_at, l.leased_at, a.ended_at)::timestamptz,
        j.producer,
        coalesce(l.lease_owner, a.worker),
        case
            when l.job_id is null
            and _status(false, false, a.outcome, a.failure_code) <> 'lost'
                then a.ended_at::timestamptz
        end,
        case when l.lease_owner is null then a.holder else l.holder end
    from job as j
    left join live_job as l on l.job_id = j.job_id
    left join lateral (
        select e.*
        from attempt as e
        where e.job_id = j.job_id
        order by e.attempt desc
        limit 1
    ) as a on true
    left join lateral (
        select e.failure_code
        from attempt as e
        where e.job_id = j.job_id and e.failure_code is not null
        order by e.attempt desc
        limit 1
    ) as f on true
    where j.job_id = p_job_id
$$;
comment on function _inspect_row(uuid) is
'The durable evidence of one job, whoever asks for it; no row where there is none.';
-- Texts are compared by their bytes whatever collation a caller's columns give them:
-- one that is not deterministic knows no patterns, two that differ no comparison.
create or replace function _is_name(p_text text, p_length integer)
returns boolean
language sql stable as $$
    select (
        length(p_text) <= p_length
        and p_text collate "C" ~ '^[A-Za-z0-9._:/-]+$'
    ) is true
$$;
comment on function _is_name(text, integer) is
'Whether the text is 1 to p_length characters of A-Z a-z 0-9 . _ : / - alone.';
-- Read by job before it is judged: the fence keeps the planner from the index of ends.
-- Inlined by each statement that reads it.
create or replace function _lease_evidence(p_job_id uuid, p_lease_token text)
returns table (outcome text, failure_code text, retryable boolean, retry_at timestamptz)
language sql stable as $$
    select a.outcome::text, a.failure_code::text, a.retryable, a.retry_at::timestamptz
    from (select e.* from attempt as e where e.job_id = p_job_id offset 0) as a
    where a.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
        and a.worker = _caller()
$$;
comment on function _lease_evidence(uuid, text) is
'How the attempt ended that ran under a lease of the caller: a verb whose first result '
'was lost on its way returns it again.';
-- The lists of codes, marks and delays count from 1. Without codes it releases.
create or replace function _lease_give_back(
    p_job_ids uuid[], p_lease_tokens text[], p_failure_codes text[],
    p_retryable boolean[], p_delays_seconds integer[]
)
returns setof failed_item
language plpgsql volatile as $$
declare
    v_caller text      collate "C" := _caller();
    v_valid  boolean[] := array(
        select case
            when p_failure_codes is null
                then coalesce(u.delay_seconds between 0 and 86400, false)
            else
                _is_name(u.failure_code, 128) and u.retryable is not null
                and coalesce(u.delay_seconds >= 0, true)
        end
        from unnest(p_failure_codes, p_retryable, p_delays_seconds)
        with ordinality as u (failure_code, retryable, delay_seconds, item)
        order by u.item
    );
    v_rows   tid[];
    v_items  integer[];
    v_queues text[];
begin
    -- Rows are locked in the order of their ids, as everywhere. Of items with the same
    -- lease the first one counts. A job that was released 100 times keeps its lease.
    select array_agg(l.ctid order by i.item), array_agg(i.item order by i.item)
    into v_rows, v_items
    from (
        select u.job_id, u.lease_token, u.item::integer
        from unnest(p_job_ids, p_lease_tokens, v_valid)
        with ordinality as u (job_id, lease_token, is_valid, item)
        where u.is_valid
        order by u.job_id
    ) as i
    cross join lateral (
        select l.ctid
        from live_job as l
        where l.job_id = i.job_id
            and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = v_caller
            and (
                p_failure_codes is not null
                or 100 > (
                    select count(*)
                    from attempt as e
                    where e.job_id = l.job_id and e.outcome = 'released'
                )
            )
        for update
    ) as l;

    -- The statement that writes reads the clock, behind every lock. A retry moves its
    -- row in every index, so the row is taken out and put back: rows found by their
    -- place leave the planner no join to choose.
    with taken as (
        delete from live_job as l
        where l.ctid = any (v_rows) and l.lease_expires_at > clock_timestamp()
        returning
            l.*, clock_timestamp() as ended_at,
            v_items[array_position(v_rows, l.ctid)] as item
    ),
    decided as materialized (
        select t.*, i.*,
            case
                when p_failure_codes is null and i.delay_seconds = 0 then t.available_at
                when p_failure_codes is null
                    then t.ended_at + make_interval(secs => i.delay_seconds)
                when i.retryable and t.attempt < t.max_attempts
                    then _lease_retry_at(
                        t.ended_at, t.attempt,
                        n.retry_base_seconds, n.retry_max_seconds, n.retry_jitter,
                        i.delay_seconds
                    )
            end as retry_at
        from taken as t
        left join instance as n on true
        cross join lateral (
            values (
                p_failure_codes[t.item], p_retryable[t.item], p_delays_seconds[t.item]
            )
        ) as i (failure_code, retryable, delay_seconds)
    ),
    requeued as (
        insert into live_job (
            job_id, available_at, attempt, max_attempts, payload_bytes, queue,
            last_failure_code
        )
        select d.job_id, d.retry_at, d.attempt,
            case
                when p_failure_codes is null
                    then least(d.max_attempts, 2147483646) + 1
                else d.max_attempts
            end,
            d.payload_bytes, d.queue, coalesce(d.failure_code, d.last_failure_code)
        from decided as d
        where d.retry_at is not null
        returning queue
    ),
    evidence as (
        insert into attempt (
            job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
            retryable, queue, worker, outcome, failure_code, lease_token_hash, holder
        )
        select d.job_id, coalesce(d.leased_at, d.ended_at), d.ended_at, d.retry_at,
            d.attempt, d.max_attempts, d.retryable, d.queue, d.lease_owner,
            case
                when p_failure_codes is null then 'released'
                when d.retry_at is null then 'failed'
                else 'retried'
            end,
            d.failure_code, d.lease_token_hash, d.holder
        from decided as d
    )
    select array_agg(distinct r.queue) into v_queues from requeued as r;
    perform _queue_wake(q.queue)
    from unnest(v_queues) as q (queue)
    where _queue_is_awaited(q.queue);

    -- A lease that is still live was refused for its job's many releases.
    return query
    select i.item::integer, i.job_id,
        case
            when not i.is_valid and p_failure_codes is not null
                then 'invalid_failure'
            when not i.is_valid then 'invalid_argument'
            when a.outcome = 'failed' then 'failed'
            when a.outcome is not null then 'queued'
            when exists (
                select
                from live_job as l
                where l.job_id = i.job_id
                    and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
                    and l.lease_owner = v_caller
                    and l.lease_expires_at > clock_timestamp()
            ) then 'invalid_argument'
            else 'invalid_lease'
        end,
        a.retry_at
    from unnest(p_job_ids, p_lease_tokens, v_valid)
    with ordinality as i (job_id, lease_token, is_valid, item)
    left join lateral _lease_evidence(i.job_id, i.lease_token) as a
        on i.is_valid and case
            when p_failure_codes is null then a.outcome = 'released'
            else
                a.failure_code = p_failure_codes[i.item] collate "C"
                and a.retryable = p_retryable[i.item]
        end
    order by i.item;
end;
$$;
comment on function _lease_give_back(uuid[], text[], text[], boolean[], integer[]) is
'Ends attempts that did not succeed: they are released without failure codes, else '
'they failed. Returns one row an item in input order: queued, failed, invalid_lease, '
'invalid_failure, or invalid_argument for a delay out of range or too many releases.';
create or replace function _lease_is_broken(
    p_leased_at timestamptz, p_lease_expires_at timestamptz, p_lease_owner text,
    p_lease_token_hash bytea
)
returns boolean language sql immutable as $$
    select (p_leased_at is null) <> (p_lease_owner is null)
        or (p_lease_expires_at is null) <> (p_lease_owner is null)
        or (p_lease_token_hash is null) <> (p_lease_owner is null)
$$;
comment on function _lease_is_broken(timestamptz, timestamptz, text, bytea) is
'Whether a live row has half a lease: no worker can complete or renew it.';
-- The exponent is clamped where base * 2^17 is above every permitted maximum, so the
-- product cannot overflow or lose its bound.
create or replace function _lease_retry_at(
    p_failed_at timestamptz, p_attempt integer, p_base_seconds integer,
    p_max_seconds integer, p_jitter double precision, p_after_seconds integer
)
returns timestamptz
language sql volatile as $$
    select p_failed_at + make_interval(
        secs => case
            when p_after_seconds is not null
                then least(p_after_seconds, p_max_seconds)::double precision
            else (1 - p_jitter * random()) * least(
                p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17),
                p_max_seconds
            )
        end
    )
$$;
comment on function
_lease_retry_at(timestamptz, integer, integer, integer, double precision, integer) is
'When a failed attempt may be repeated: after the seconds that the worker names, else '
'after base * 2^(attempt - 1) less what jitter takes off; at most after max.';
-- Two random UUIDs hold 244 random bits. One secret serves the jobs of one claim: no
-- token tells anything of it, or of another.
create or replace function _lease_token(p_secret bytea, p_job_id uuid)
returns text
language sql immutable as $$
    select 'job_lease_' || encode(sha256(p_secret || uuid_send(p_job_id)), 'hex')
$$;
comment on function _lease_token(bytea, uuid) is
'The lease token of a job under the secret that its claim has drawn.';
-- The rights of the effective role decide, so that a role that is a producer and a
-- worker sees what a worker sees. Asked only about another producer's job.
create or replace function _may_inspect(p_producer text)
returns boolean
language sql stable as $$
    select p_producer = _caller()
        or exists (
            select
            from (
                values ('claim(text, integer)'), ('inspect_attempts(uuid)')
            ) as f (signature)
            where has_function_privilege(
                to_regrole(quote_ident(_caller())),
                to_regprocedure(f.signature),
                'EXECUTE'
            )
        )
$$;
comment on function _may_inspect(text) is
'Whether the caller may see the jobs of a producer: its own, or all jobs if it is a '
'worker, an observer or an operator.';
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
create or replace function _policy_kept()
returns trigger
language plpgsql
set search_path from current as $$
begin
    raise exception using errcode = 'LJ007',
        message = 'the policy of a Jobs Instance cannot be deleted',
        hint    = 'lenso-jobs configure changes it; lenso-jobs uninstall removes the '
                  'whole Instance.';
end;
$$;
comment on function _policy_kept() is
'Refuses to delete the row without which no verb works.';

create or replace trigger instance_is_kept
before delete or truncate on instance
for each statement execute function _policy_kept();
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
-- 10,000 ends are what a busy Instance has in a second or so.
create or replace function _queue_ends(
    p_since timestamptz, p_limit integer default 10000
)
returns table (
    job_id uuid, queue text, has_failed boolean, failure_code text,
    leased_at timestamptz, ended_at timestamptz
)
language sql stable as $$
    select a.job_id, a.queue::text, a.outcome <> 'succeeded', a.failure_code::text,
        a.leased_at::timestamptz, a.ended_at::timestamptz
    from attempt as a
    where a.ended_at > p_since
        and (
            a.outcome in ('succeeded', 'failed') or a.failure_code = 'attempts_exhausted'
        )
    order by a.ended_at desc
    limit p_limit
$$;
comment on function _queue_ends(timestamptz, integer) is
'The last ends of jobs since a time, newest first, so many at most.';
create or replace function _queue_front(p_queue text, p_now timestamptz)
returns table (
    live bigint, broken bigint, oldest_lapse_at timestamptz,
    oldest_leased_at timestamptz, last_claimed_at timestamptz
)
language sql stable as $$
    select count(*) filter (where f.lease_expires_at > p_now),
        count(*) filter (
            where _lease_is_broken(
                f.leased_at, f.lease_expires_at, f.lease_owner, f.lease_token_hash
            )
        ),
        min(f.lease_expires_at) filter (where f.lease_expires_at <= p_now),
        min(f.leased_at) filter (where f.lease_expires_at > p_now),
        max(f.leased_at)
    from (
        select l.*
        from live_job as l
        where l.queue = p_queue collate "C" and l.available_at <= p_now
        order by l.available_at, l.job_id
        limit 10000
    ) as f
$$;
comment on function _queue_front(text, timestamptz) is
'The leases among the first 10,000 due jobs of a queue, where claims begin.';
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
-- A NOTIFY makes the commit take a lock across the whole server, so one is sent only
-- while somebody waits: a waiter holds the queue's key shared, and where nobody does
-- this session gets it for a moment. Two producers that ask at once may each find the
-- other; that costs one notification.
create or replace function _queue_is_awaited(p_queue text)
returns boolean
language sql volatile as $$
    select case
        when pg_try_advisory_lock(_queue_key(p_queue))
            then not pg_advisory_unlock(_queue_key(p_queue))
        else true
    end
$$;
comment on function _queue_is_awaited(text) is
'Whether a session holds the advisory lock of a queue, as a waiting worker does.';
-- The table's oid tells this Instance from another in the same database. The inliner
-- makes a constant of it.
create or replace function _queue_key(p_queue text)
returns bigint
language sql stable as $$
    select hashtextextended(p_queue collate "C", 'instance'::regclass::oid::bigint)
$$;
comment on function _queue_key(text) is
'The number of a queue: its advisory lock, and the name of its claim floor.';
-- Up to 64 MB are read whole, which is a quarter of a million live jobs.
create or replace function _queue_share_to_read()
returns real
language sql volatile as $$
    select least(100, 6710886400 / greatest(1, pg_relation_size('live_job'::regclass)))
        ::real
$$;
comment on function _queue_share_to_read() is
'What percentage of the pages of live_job a count reads.';
-- Any role may hold a queue's key and so make each enqueue notify, which costs the
-- commit a lock across the whole server. So a session that has notified a queue is
-- silent for 20 ms: a waiting worker that was woken looks again after 20, 50 and 100 ms
-- anyway. The setting rolls back with its transaction. A forged one silences only its
-- own session. PL/pgSQL keeps the plan; a function in SQL would be planned by every
-- call.
create or replace function _queue_wake(p_queue text)
returns void
language plpgsql volatile as $$
declare
    v_setting text   := 'lenso_jobs.woke_' || to_hex(_queue_key(p_queue));
    v_woke_us text   := current_setting(v_setting, true);
    v_now_us  bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
begin
    if v_woke_us collate "C" ~ '^[0-9]+$' and length(v_woke_us) <= 16 then
        if v_now_us - v_woke_us::bigint between 0 and 19999 then
            return;
        end if;
    end if;

    perform
        pg_notify(current_schema(), p_queue),
        set_config(v_setting, v_now_us::text, false)
    from instance as i
    where i.notify and p_queue collate "C" <> all (i.paused);
end;
$$;
comment on function _queue_wake(text) is
'Notifies the sessions that wait for a queue, on the channel named as the schema, '
'unless this session did so within the last 20 ms, or the queue is paused.';
create or replace function _redrive_jobs(
    p_job_ids uuid[], p_extra_attempts integer, p_over_seconds integer,
    out jobs integer, out available_at timestamptz
)
language plpgsql volatile as $$
begin
    -- A lock that leaves a new version behind: a purge with an older snapshot then
    -- fails to serialize, instead of deleting the job of a live row it cannot see.
    update job as j set producer = j.producer where j.job_id = any (p_job_ids);

    with queued as (
        insert into live_job as l (
            job_id, available_at, attempt, max_attempts, payload_bytes, queue,
            last_failure_code
        )
        select j.job_id,
            clock_timestamp() + make_interval(
                secs => p_over_seconds * (p.place - 1.0) / cardinality(p_job_ids)
            ),
            a.attempt, a.attempt + p_extra_attempts, octet_length(j.payload::text),
            j.queue, a.failure_code
        from unnest(p_job_ids) with ordinality as p (job_id, place)
        cross join lateral (
            select i.* from job as i where i.job_id = p.job_id offset 0
        ) as j
        cross join lateral (
            select e.*
            from attempt as e
            where e.job_id = p.job_id
            order by e.attempt desc
            limit 1
        ) as a
        where _status(false, false, a.outcome, a.failure_code) = 'failed'
            and (select n.job_id from live_job as n where n.job_id = p.job_id) is null
        returning l.available_at
    )
    select count(*)::integer, min(q.available_at)
    into jobs, available_at
    from queued as q;
end;
$$;
comment on function _redrive_jobs(uuid[], integer, integer) is
'Queues those of the jobs that have failed again, with that many more attempts each. '
'They fall due evenly over so many seconds from now, in the order given. Returns how '
'many, and when the first falls due.';
create or replace function _require_batch(p_names text, variadic p_dimensions text[])
returns void
language plpgsql stable as $$
begin
    if (
        p_dimensions[1] collate "C" = all (p_dimensions)
        and p_dimensions[1] collate "C" ~ '^[[]1:([1-9][0-9]?[0-9]?|1000)[]]$'
    ) is not true then
        raise exception using errcode = 'LJ007',
            message = format('%s must be parallel lists of 1 to 1000 items', p_names);
    end if;
end;
$$;
comment on function _require_batch(text, text[]) is
'Refuses arrays of these dimensions unless they are parallel lists of 1 to 1000 items '
'(LJ007).';
create or replace function _require_kind(p_kind text)
returns void
language plpgsql stable as $$
begin
    if p_kind is not null and not _is_name(p_kind, 256) then
        raise exception using errcode = 'LJ007',
            message = 'kind must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -';
    end if;
end;
$$;
comment on function _require_kind(text) is
'Refuses a malformed kind of a search (LJ007); NULL is any.';
create or replace function _require_no_jobs_outside(p_queues text[])
returns void
language plpgsql volatile as $$
declare
    v_held text;
begin
    if not exists (select from queue as q where q.queue <> all (p_queues)) then
        return;
    end if;
    -- A session that enqueues has read the row of instance, and holds the table until
    -- its transaction ends: behind this lock every job of the queue can be seen, but
    -- for those that a transaction with an older snapshot may still add. Every verb
    -- waits behind the lock. So the configuration sets a lock timeout, and the jobs are
    -- counted so far and no further.
    lock table instance in access exclusive mode;
    select string_agg(
        format(
            '%s (%s)', q.queue,
            case when h.jobs > 10000 then 'more than 10000' else h.jobs::text end
        ),
        ', ' order by q.queue
    )
    into v_held
    from queue as q
    cross join lateral (
        select count(*) as jobs
        from (select from live_job as l where l.queue = q.queue limit 10001) as l
    ) as h
    where q.queue <> all (p_queues) and h.jobs > 0;
    if v_held is not null then
        raise exception using errcode = 'LJ007',
            message = format(
                'queues that the document leaves out still have live jobs: %s', v_held
            ),
            hint    = 'Declare them until their jobs have ended. Or drop them all the '
                      'same, lenso-jobs configure --drop-queues: the jobs wait until '
                      'their queue is declared again.';
    end if;
end;
$$;
comment on function _require_no_jobs_outside(text[]) is
'Refuses to leave a declared queue out that has live jobs (LJ007).';
create or replace function _require_policy()
returns void
language plpgsql stable as $$
begin
    if not exists (select from instance) then
        raise exception using errcode = 'LJ008',
            message = 'no policy is stored in this Instance',
            hint    = 'Run lenso-jobs configure.';
    end if;
end;
$$;
comment on function _require_policy() is
'Refuses an Instance whose policy row is missing (LJ008).';
create or replace function _require_producer()
returns void
language plpgsql stable as $$
begin
    if not exists (select from instance as i where _caller() = any (i.producers)) then
        perform _require_policy();
        raise exception using errcode = '42501',
            message = format('role %I is not a declared producer', _caller()),
            hint    = 'SET ROLE to a role that producer_instances names.';
    end if;
end;
$$;
comment on function _require_producer() is
'Refuses a caller that is not a declared producer (42501), and every caller while no '
'policy is stored (LJ008).';
create or replace function _require_queue(p_queue text)
returns void
language plpgsql stable as $$
begin
    if not exists (select from queue as q where q.queue = p_queue collate "C") then
        raise exception using errcode = 'LJ003',
            message = 'queue is not declared',
            hint    = _queue_hint(p_queue);
    end if;
end;
$$;
comment on function _require_queue(text) is
'Refuses a queue that is not declared (LJ003).';
create or replace function _require_range(
    p_name text, p_value integer, p_least integer, p_most integer
)
returns void
language plpgsql stable as $$
begin
    if (p_value between p_least and p_most) is not true then
        raise exception using errcode = 'LJ007',
            message = format('%s must be from %s to %s', p_name, p_least, p_most);
    end if;
end;
$$;
comment on function _require_range(text, integer, integer, integer) is
'Refuses a value that is NULL or out of its range (LJ007).';
create or replace function _require_tables()
returns void
language plpgsql stable as $$
declare
    v_lost record;
begin
    select t.* into v_lost from _catalogue_lost_table() as t;
    if found then
        raise exception using errcode = 'LJ008',
            message = concat_ws(' ', v_lost.subject, v_lost.detail),
            hint    = 'Somebody changed the Instance by hand: run lenso-jobs check.';
    end if;
end;
$$;
comment on function _require_tables() is
'Refuses to read an Instance of which a table is missing or lost (LJ008).';
-- pg_locks names no savepoint that was released, though rows go on naming it. age()
-- counts from this transaction's own number if it has one: its own savepoints are left
-- out, as is what is no transaction's number, which pg_xact_status may refuse.
create or replace function _session_is_in_progress(p_transaction xid)
returns boolean
language sql stable as $$
    select coalesce(
        case
            when age(p_transaction) between 1 and 2147483646 and f.n > 2
                then pg_xact_status(f.n::text::xid8) = 'in progress'
        end,
        false
    )
    from pg_snapshot_xmax(pg_current_snapshot()) as x (id)
    cross join lateral (
        select x.id::text::bigint + age(x.id::xid) - age(p_transaction) as n
    ) as f
$$;
comment on function _session_is_in_progress(xid) is
'Whether another transaction, or a part of it, is still open.';
-- Only a member of pg_read_all_stats sees since when a transaction is open.
create or replace function _session_list()
returns table (
    name text, place text, pid integer, since timestamptz, xmin xid, xid xid,
    owner text, is_remote boolean, remedy text
)
language sql stable as $$
    select 'session ' || s.pid, s.pid::text, s.pid, s.xact_start, s.backend_xmin,
        s.backend_xid, s.usename::text, r.pid is not null,
        format('select pg_terminate_backend(%s)', s.pid)
    from pg_stat_activity as s
    left join pg_stat_replication as r on r.pid = s.pid
    where s.pid <> pg_backend_pid()
        and (
            (s.datname = current_database() and s.usesysid is not null)
            -- A session that is only connecting is in no database, with a snapshot, too.
            or r.pid is not null
        )
    union all
    select 'prepared transaction ' || x.gid,
        (
            select l.virtualtransaction
            from pg_locks as l
            where l.pid is null and l.transactionid = x.transaction
        ),
        null, x.prepared, x.transaction, x.transaction, x.owner::text, false,
        format('rollback prepared %L', x.gid)
    from pg_prepared_xacts as x
    where x.database = current_database()
    union all
    select 'replication slot ' || r.slot_name, null, null, null, r.xmin, null,
        case when r.active then 'active' else 'not active' end, true,
        case
            when not r.active
                then format('select pg_drop_replication_slot(%L)', r.slot_name)
        end
    from pg_replication_slots as r
    where r.xmin is not null
$$;
comment on function _session_list() is
'Sessions and prepared transactions of this database, standbys, and slots that hold a '
'snapshot, each with the statement that ends it.';
-- Reading waits for ACCESS EXCLUSIVE alone, claims for what CREATE INDEX takes, too.
-- All that would wait for a lock wait behind a session that waits for it.
create or replace function _session_locks()
returns table (
    place text, pid integer, locked text, stops_reads boolean, stops_claims boolean
)
language sql stable as $$
    select coalesce(l.pid::text, l.virtualtransaction), l.pid,
        min(
            case when l.granted then 'has locked ' else 'waits to lock ' end || c.relname
        ) filter (where w.is_in_the_way),
        bool_or(l.mode = 'AccessExclusiveLock'),
        bool_or(w.is_in_the_way and c.oid = 'live_job'::regclass)
    from pg_locks as l
    join pg_database as d on d.oid = l.database and d.datname = current_database()
    join pg_class as c on c.oid = l.relation
    cross join lateral (
        select c.oid in ('job'::regclass, 'live_job'::regclass, 'attempt'::regclass)
    ) as h (is_hot)
    cross join lateral (
        select
            l.mode = 'AccessExclusiveLock' or (
                h.is_hot
                and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock')
            )
    ) as w (is_in_the_way)
    where l.locktype = 'relation'
        and c.relnamespace = (
            select i.relnamespace from pg_class as i where i.oid = 'instance'::regclass
        )
        and (
            w.is_in_the_way
            or (
                l.granted
                and (h.is_hot or c.oid = 'instance'::regclass)
                -- VACUUM, ANALYZE and CREATE INDEX CONCURRENTLY write no rows.
                and l.mode not in (
                    'AccessShareLock', 'SIReadLock', 'ShareUpdateExclusiveLock'
                )
            )
        )
    group by 1, 2
$$;
comment on function _session_locks() is
'The sessions and prepared transactions that write to tables of this Instance, and the '
'lock of each that reads or the verbs wait for.';
-- Of the server, of the database, and of each role that is or may act as a declared
-- caller. A superuser's own settings stop nobody.
create or replace function _session_settings()
returns table (
    place text, role oid, setting text, value text, is_harmful boolean, remedy text
)
language sql stable as $$
    with stored as (
        select s.setdatabase <> 0 as is_here, s.setrole as role,
            o.option_name as setting, o.option_value as value
        from pg_db_role_setting as s
        cross join pg_options_to_table(s.setconfig) as o
        left join pg_database as d on d.oid = s.setdatabase
        where coalesce(d.datname, current_database()) = current_database()
            and (
                s.setrole = 0
                or exists (
                    select from caller as c
                    join pg_roles as r on r.rolname = c.caller
                    join pg_roles as u on u.oid = s.setrole and not u.rolsuper
                    where pg_has_role(u.oid, r.oid, 'member')
                )
            )
        union all
        select null, 0, s.name, concat(s.reset_val, s.unit)
        from pg_settings as s
        where s.source in ('configuration file', 'command line')
    )
    select
        case
            when s.is_here is null then 'the server'
            else format(replace(t.place, '$I', '$s'), t.role, current_database())
        end,
        s.role, s.setting, s.value,
        (
            v.is_read_only
            or (
                s.setting in ('statement_timeout', 'transaction_timeout')
                and v.lasts < interval '100 milliseconds'
            )
        ) is true,
        case
            when s.is_here is null
                then 'take it out of the server''s configuration, and reload that'
            else format(
                case
                    when v.is_read_only then 'begin read write; alter %s reset %s; commit'
                    else 'alter %s reset %s'
                end, format(t.place, t.role, current_database()), s.setting
            )
        end
    from stored as s
    cross join lateral (
        select pg_get_userbyid(s.role),
            concat_ws(
                ' in ', case
                    when s.role <> 0 then 'role %1$I' when not s.is_here then 'role all'
                end,
                case when s.is_here then 'database %2$I' end
            )
    ) as t (role, place)
    cross join lateral (
        select
            case
                when s.setting = 'default_transaction_read_only' then s.value::boolean
            end,
            -- A number without a unit is in milliseconds, and 0 is no limit.
            nullif(
                case
                    when s.setting not in (
                        'statement_timeout', 'transaction_timeout', 'lock_timeout',
                        'idle_in_transaction_session_timeout', 'idle_session_timeout'
                    ) then null
                    when s.value ~ '^[0-9]+$' then s.value || ' ms'
                    else s.value
                end::interval, '0'
            )
    ) as v (is_read_only, lasts)
    where v.is_read_only or v.lasts is not null
$$;
comment on function _session_settings() is
'Read-only defaults and timeouts with which the sessions of declared callers begin, '
'and whether their calls fail by it.';
create or replace function _session_waiting(p_queue text)
returns integer language plpgsql stable as $$
begin
    return (
        select count(*)::integer
        from pg_locks as l
        where l.locktype = 'advisory'
            and l.objsubid = 1
            and l.mode = 'ShareLock'
            and l.granted
            and l.database = (
                select d.oid from pg_database as d where d.datname = current_database()
            )
            and (l.classid::bigint << 32) | l.objid::bigint = _queue_key(p_queue)
    );
exception when insufficient_privilege then
    return null;
end;
$$;
comment on function _session_waiting(text) is
'How many sessions wait for a queue, as wait_key has them; NULL where pg_locks is '
'hidden.';
-- What another session has become by SET ROLE cannot be seen, so each that may take a
-- worker's role counts. A superuser may take any and does not count. From 16 on the
-- maker of a role is a member, and may not take it.
create or replace function _session_workers()
returns table (worker text, sessions integer)
language plpgsql stable as $$
begin
    return query
    select c.caller::text, count(s.pid)::integer
    from caller as c
    left join pg_roles as r on r.rolname = c.caller
    left join (
        select a.pid, a.usesysid
        from pg_stat_activity as a
        join pg_roles as u on u.oid = a.usesysid
        where a.datname = current_database()
            and not u.rolsuper
            and a.pid <> pg_backend_pid()
    ) as s on pg_has_role(
        s.usesysid, r.oid,
        case
            when current_setting('server_version_num')::integer < 160000 then 'member'
            else 'set'
        end
    )
    where c.is_worker
    group by c.caller;
exception when insufficient_privilege then
    return query select c.caller::text, null::integer from caller as c where c.is_worker;
end;
$$;
comment on function _session_workers() is
'For each declared worker how many sessions in this database may act as it; NULL where '
'pg_stat_activity is hidden.';
create or replace function _status(
    p_is_live boolean, p_is_leased boolean, p_outcome text, p_failure_code text
)
returns text
language sql immutable as $$
    select case
        when p_is_leased then 'running'
        when p_is_live then 'queued'
        when p_outcome = 'succeeded' then 'succeeded'
        when p_outcome = 'failed' then 'failed'
        when p_outcome = 'lease_expired' and p_failure_code = 'attempts_exhausted'
            then 'failed'
        else 'lost'
    end
$$;
comment on function _status(boolean, boolean, text, text) is
'The status of a job by its live row and its last attempt. A job is lost if it is not '
'live and no attempt ended it: its row in live_job was deleted by hand.';
create or replace function claim(p_queue text, p_limit integer default 1)
returns setof leased_job
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_tidscan = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_caller  text        collate "C";
    v_holder  text        collate "C";
    v_lease   interval;
    v_place   integer;
    v_paused  boolean;
    v_floor   regclass[];
    v_was     bigint;
    v_start   record;
    v_at      timestamptz := timestamptz '-infinity';
    v_id      uuid        := uuid '00000000-0000-0000-0000-000000000000';
    v_scan_at timestamptz;
    v_job     leased_job;
    v_rows    tid[];
    v_now     timestamptz := clock_timestamp();
    v_read    bigint      := _claim_entries_read();
    v_secret  bytea
    := uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());
begin
    -- So much of a name is in pg_stat_activity. Outside ASCII the setting is longer.
    select _caller(), nullif(left(current_setting('application_name'), 63), ''),
        make_interval(secs => i.lease_seconds),
        array_position(i.queues, p_queue collate "C"), i.floors,
        p_queue collate "C" = any (i.paused)
    into v_caller, v_holder, v_lease, v_place, v_floor, v_paused
    from instance as i
    where _caller() = any (i.workers);
    if not found then
        perform _require_policy();
        raise exception using errcode = '42501',
            message = format('role %I is not a declared worker', _caller()),
            hint    = 'SET ROLE to a role that worker_instances names.';
    end if;
    if v_place is null then
        perform _require_queue(p_queue);
    end if;
    if (p_limit between 1 and 1000) is not true then
        raise exception using errcode = 'LJ007',
            message = 'limit must be from 1 to 1000';
    end if;
    if v_paused then
        return;
    end if;

    v_floor := _claim_floor_of(v_floor, v_place);
    v_was := pg_sequence_last_value(v_floor[1]);
    if v_was is not null then
        v_start := _claim_floor(v_floor, v_now);
        v_at := v_start.at;
        v_id := v_start.id;
        v_scan_at := v_start.scan_at;
    end if;

    -- One job: one statement, an eighth of a whole claim cheaper. It leaves a row that
    -- holds a lease of any kind, or was changed since the snapshot, to the statements
    -- below. The UPDATE reads the clock, so that no wait for a lock on a table shortens
    -- the lease.
    if p_limit = 1 and coalesce(v_scan_at > v_now, true) then
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = c.now,
                lease_expires_at = c.now + v_lease,
                lease_owner = v_caller,
                holder = v_holder,
                lease_token_hash
                = sha256(convert_to(_lease_token(v_secret, l.job_id), 'UTF8'))
            from (select clock_timestamp() as now offset 0) as c
            where
                l.ctid = (
                    select d.ctid
                    from live_job as d
                    where d.queue = p_queue collate "C"
                        and d.available_at <= v_now
                        and (d.available_at, d.job_id) > (v_at, v_id)
                        and (d.lease_expires_at is null or d.lease_expires_at <= v_now)
                    order by d.available_at, d.job_id
                    limit 1
                    for update skip locked
                )
                and num_nulls(
                    l.leased_at, l.lease_expires_at, l.lease_owner, l.lease_token_hash
                ) = 4
                and l.attempt < l.max_attempts
            returning l.*
        )
        select l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, _lease_token(v_secret, l.job_id),
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        into v_job
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j;
        if v_job.job_id is not null then
            return next v_job;
            if _claim_entries_read() - v_read > 101 then
                perform _claim_floor_move(
                    v_floor, v_was, v_now, v_scan_at is null, l.available_at, l.job_id
                )
                from live_job as l
                where l.job_id = v_job.job_id;
            end if;
            return;
        end if;
    end if;

    -- No column of an index changes: the new version stays in its page and the index
    -- is left alone. The rows are locked, so they are where they were. They are found by
    -- place, and each job by its key behind a fence: the planner has nothing to choose.
    -- Each token is made once, because hashes are a quarter of the cost of a job.
    -- A live row whose job was deleted by hand is leased to nobody. If all were such
    -- rows, it looks again: then no lease that it returns has waited for the locks of
    -- another round.
    for v_round in 1 .. 64 loop
        v_rows := _claim_due(p_queue collate "C", p_limit, v_floor);
        return query
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = c.now,
                lease_expires_at = c.now + v_lease,
                lease_owner = v_caller,
                holder = v_holder,
                lease_token_hash = sha256(convert_to(t.token, 'UTF8'))
            from (select clock_timestamp() as now offset 0) as c
            cross join (
                select r.ctid, _lease_token(v_secret, r.job_id) as token
                from live_job as r
                where r.ctid = any (v_rows)
                offset 0
            ) as t
            where l.ctid = t.ctid
            returning l.*, t.token
        )
        select l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, l.token,
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j
        order by l.available_at, l.job_id;
        exit when found or v_rows = '{}';
    end loop;
end;
$$;
comment on function claim(text, integer) is
'Leases up to p_limit due jobs of a queue, oldest due first, each with its attempt '
'(the fencing token) and a fresh lease token, and at most 16 MB of payloads in all. '
'Returns no row where none is due or the queue is paused. Reclaims lapsed leases '
'and ends up to 64 jobs that have no attempt left. Refuses an undeclared caller '
'(42501), an undeclared queue (LJ003), a limit outside 1 to 1000 (LJ007), and every '
'call while no policy is stored (LJ008).';
create or replace function complete(p_job_id uuid, p_lease_token text)
returns boolean
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
begin
    -- The insert judges the lease once the delete holds the row. Where it has expired,
    -- nothing is inserted and the refusal below undoes the delete.
    with ended as (
        delete from live_job as l
        where l.job_id = p_job_id
            and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        returning l.*
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        queue, worker, outcome, lease_token_hash, holder
    )
    select e.job_id, coalesce(e.leased_at, clock_timestamp()), clock_timestamp(),
        e.attempt, e.max_attempts, e.queue, e.lease_owner, 'succeeded',
        e.lease_token_hash, e.holder
    from ended as e
    where e.lease_expires_at > clock_timestamp();
    if found then
        return true;
    end if;

    perform
    from _lease_evidence(p_job_id, p_lease_token) as a
    where a.outcome = 'succeeded';
    if not found then
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;
    return true;
end;
$$;
comment on function complete(uuid, text) is
'Ends a job as succeeded, in the caller''s transaction; repeated under the same lease '
'it returns true once more. Refuses a lease that is not live and the caller''s own '
'(LJ004).';
create or replace function complete_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof completed_item
language plpgsql security definer
set search_path from current as $$
declare
    v_caller text collate "C" := _caller();
    v_rows   tid[];
    v_ended  integer;
begin
    perform _require_batch(
        'job_ids and lease_tokens',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:])
    );

    -- Rows are locked in the order of their ids, as everywhere, and the leases judged
    -- when the last of them is: one may end while the call waits for another's row.
    select array_agg(m.ctid) into v_rows
    from (
        select i.job_id, sha256(convert_to(i.lease_token, 'UTF8')) as lease_token_hash
        from unnest(p_job_ids, p_lease_tokens) as i (job_id, lease_token)
        order by i.job_id
    ) as i
    cross join lateral (
        select l.ctid
        from live_job as l
        where l.job_id = i.job_id
            and l.lease_token_hash = i.lease_token_hash
            and l.lease_owner = v_caller
        for update
    ) as m;

    with ended as (
        delete from live_job as l
        where l.ctid = any (v_rows) and l.lease_expires_at > clock_timestamp()
        returning l.*, clock_timestamp() as ended_at
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        queue, worker, outcome, lease_token_hash, holder
    )
    select e.job_id, coalesce(e.leased_at, e.ended_at), e.ended_at, e.attempt,
        e.max_attempts, e.queue, e.lease_owner, 'succeeded', e.lease_token_hash, e.holder
    from ended as e;
    get diagnostics v_ended = row_count;
    if v_ended = cardinality(p_job_ids) then
        return query
        select i.ordinality::integer, i.job_id, 'completed'
        from unnest(p_job_ids) with ordinality as i (job_id);
        return;
    end if;

    return query
    select i.ordinality::integer, i.job_id,
        case when a.outcome is null then 'invalid_lease' else 'completed' end
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral _lease_evidence(i.job_id, i.lease_token) as a
        on a.outcome = 'succeeded'
    order by i.ordinality;
end;
$$;
comment on function complete_many(uuid[], text[]) is
'Completes many jobs at once. Returns one row an item in input order: completed or '
'invalid_lease. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
create or replace function enqueue(
    p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text,
    p_available_at timestamptz default null, p_max_attempts integer default 3
)
returns enqueued_job
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
    v_caller text collate "C" := _caller();
    v_fault  text             := _enqueue_fault(
        p_queue, p_kind, p_payload, p_idempotency_key, p_available_at, p_max_attempts
    );
    v_answer enqueued_job;
begin
    loop
        -- The insert itself proves caller and queue: nearly every call asks nothing
        -- else. One statement takes the locks on both tables before it reads the clock.
        if v_fault is null then
            with fresh as (
                insert into job (
                    job_id, created_at, available_at, max_attempts,
                    producer, queue, kind, idempotency_key, payload
                )
                select _enqueue_job_id(c.now), c.now, p_available_at, p_max_attempts,
                    v_caller, p_queue, p_kind, p_idempotency_key, p_payload
                from (
                    select clock_timestamp() as now
                    from instance as i
                    where v_caller = any (i.producers)
                        and p_queue collate "C" = any (i.queues)
                    offset 0
                ) as c
                on conflict (producer, idempotency_key) do nothing
                returning job_id, created_at
            )
            insert into live_job (
                job_id, available_at, attempt, max_attempts, payload_bytes, queue
            )
            select f.job_id, greatest(p_available_at, f.created_at), 0, p_max_attempts,
                pg_column_size(p_payload), p_queue
            from fresh as f
            returning job_id, true into v_answer;
        end if;
        if v_answer.created then
            if _queue_is_awaited(p_queue) then
                perform _queue_wake(p_queue);
            end if;
            return v_answer;
        end if;

        v_answer := _enqueue_again(
            p_queue, p_kind, p_payload, p_idempotency_key, p_available_at,
            p_max_attempts, v_fault
        );
        exit when v_answer.job_id is not null;
    end loop;
    return v_answer;
end;
$$;
comment on function enqueue(text, text, jsonb, text, timestamptz, integer) is
'Makes a job durable. Returns the job and whether this call created it: the same key '
'with the same intent returns the first job. Refuses an undeclared caller (42501), an '
'argument out of bounds or an undeclared queue (LJ001), a key used for another intent '
'(LJ002, with the job_id that has the key in DETAIL), and every call while no policy '
'is stored (LJ008).';
create or replace function enqueue_many(p_jobs jsonb)
returns setof enqueued_item
language plpgsql security definer
set search_path from current as $$
declare
    v_caller text        := _caller();
    v_queues text[];
    v_now    timestamptz;
    v_random uuid        := gen_random_uuid();
    v_ids    uuid[];
    v_new    integer     := 0;
    v_count  integer;
    v_filled text[];
    v_items  enqueued_item[];
begin
    perform _require_producer();
    select i.queues into v_queues from instance as i;
    if (jsonb_typeof(p_jobs) = 'array') is not true then
        raise exception using errcode = 'LJ001', message = 'jobs must be a JSON array';
    end if;
    -- A document from a table may be compressed: the concatenation unpacks it.
    if pg_column_size(
        case when pg_column_compression(p_jobs) is null then p_jobs else p_jobs || '[]' end
    ) > 16777216 then
        raise exception using errcode = 'LJ007',
            message = 'jobs must be at most 16777216 bytes (16 MB) as jsonb',
            hint    = 'Divide them into several calls.';
    end if;
    if jsonb_array_length(p_jobs) not between 1 and 1000 then
        raise exception using errcode = 'LJ007', message = 'jobs must be 1 to 1000 items';
    end if;

    -- The clock is read behind the locks on the tables.
    lock table job, live_job in row exclusive mode;
    v_now := clock_timestamp();

    -- An item's id tells its position, and its instant is one microsecond after its
    -- predecessor's: input order is order of enqueueing. Their random half is drawn
    -- once.
    v_ids := array(
        select _enqueue_job_id(v_now + n * interval '1 microsecond', v_random)
        from generate_series(1, jsonb_array_length(p_jobs)) as n
    );
    loop
        -- Keys go in sorted, so that no two batches wait for each other.
        with fresh as (
            insert into job (
                job_id, created_at, available_at, max_attempts,
                producer, queue, kind, idempotency_key, payload
            )
            select v_ids[i.position], v_now + i.position * interval '1 microsecond',
                i.available_at, i.max_attempts,
                v_caller, i.queue, i.kind, i.idempotency_key, i.payload
            from (
                select distinct on (f.idempotency_key collate "C") f.*
                from _enqueue_items(p_jobs) as f
                where f.is_valid and f.queue = any (v_queues)
                order by f.idempotency_key collate "C", f.position
            ) as i
            on conflict (producer, idempotency_key) do nothing
            returning
                job_id, available_at, created_at, max_attempts, queue,
                pg_column_size(payload) as payload_bytes
        ),
        -- In the order of their ids, which is that of both indexes and of claims.
        live as (
            insert into live_job (
                job_id, available_at, attempt, max_attempts, payload_bytes, queue
            )
            select f.job_id, greatest(f.available_at, f.created_at), 0, f.max_attempts,
                f.payload_bytes, f.queue
            from fresh as f
            order by f.job_id
            returning queue
        )
        select count(*)::integer, array_agg(distinct l.queue)
        into v_count, v_filled
        from live as l;
        perform _queue_wake(q.queue)
        from unnest(v_filled) as q (queue)
        where _queue_is_awaited(q.queue);
        v_new := v_new + v_count;
        if v_new = cardinality(v_ids) then
            return query
            select n, v_ids[n], 'created'
            from generate_series(1, cardinality(v_ids)) as n;
            return;
        end if;

        -- As in enqueue, a statement of its own; an item with neither a job nor a
        -- fault was purged in between, and the batch goes round again.
        select array_agg(
            (
                i.position,
                case when r.outcome in ('created', 'existing') then j.job_id end,
                r.outcome
            )::enqueued_item
            order by i.position
        )
        into v_items
        from (
            select f.*, f.is_valid and f.queue = any (v_queues) as ok
            from _enqueue_items(p_jobs) as f
            offset 0
        ) as i
        left join lateral _enqueue_known_job(
            v_caller, i.queue, i.kind, i.payload, i.idempotency_key, i.available_at,
            i.max_attempts
        ) as j on i.ok
        cross join lateral (
            select case
                when not i.ok then 'invalid_job'
                when j.job_id = v_ids[i.position] then 'created'
                when j.is_same then 'existing'
                when j.job_id is not null then 'conflict'
            end as outcome
        ) as r;
        exit when not exists (select from unnest(v_items) as u where u.outcome is null);
    end loop;
    return query select u.* from unnest(v_items) as u;
end;
$$;
comment on function enqueue_many(jsonb) is
'Makes an array of jobs durable, each an object with the fields of enqueue, and '
'returns one row an item in input order; a bad item spoils no other. Refuses an '
'undeclared caller (42501), a document that is not an array (LJ001), other than 1 to '
'1000 items or more than 16 MB (LJ007), and every call while no policy is stored '
'(LJ008).';
create or replace function fail(
    p_job_id uuid, p_lease_token text, p_failure_code text, p_retryable boolean,
    p_retry_after_seconds integer default null
)
returns failed_job
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_answer failed_job;
    v_queue  text;
begin
    if not _is_name(p_failure_code, 128) then
        raise exception using errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of '
                      'A-Z a-z 0-9 . _ : / -';
    end if;
    if p_retryable is null then
        raise exception using errcode = 'LJ005', message = 'retryable must not be NULL';
    end if;
    if p_retry_after_seconds < 0 then
        raise exception using errcode = 'LJ005',
            message = 'retry_after_seconds must be 0 or more, or NULL';
    end if;
    if p_retryable then
        perform _require_policy();
    end if;

    -- The statement that writes reads the clock, behind every lock. Where the lease has
    -- expired nothing is decided, and the refusal below undoes the delete.
    with taken as (
        delete from live_job as l
        where l.job_id = p_job_id
            and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        returning l.*, clock_timestamp() as ended_at
    ),
    decided as (
        select t.*,
            case when p_retryable and t.attempt < t.max_attempts
                then _lease_retry_at(
                    t.ended_at, t.attempt,
                    i.retry_base_seconds, i.retry_max_seconds, i.retry_jitter,
                    p_retry_after_seconds
                )
            end as retry_at
        from taken as t
        left join instance as i on true
        where t.lease_expires_at > t.ended_at
    ),
    requeued as (
        insert into live_job (
            job_id, available_at, attempt, max_attempts, payload_bytes, queue,
            last_failure_code
        )
        select
            d.job_id, d.retry_at, d.attempt, d.max_attempts, d.payload_bytes, d.queue,
            p_failure_code
        from decided as d
        where d.retry_at is not null
    ),
    evidence as (
        insert into attempt (
            job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
            retryable, queue, worker, outcome, failure_code, lease_token_hash, holder
        )
        select d.job_id, coalesce(d.leased_at, d.ended_at), d.ended_at, d.retry_at,
            d.attempt, d.max_attempts, p_retryable, d.queue, d.lease_owner,
            case when d.retry_at is null then 'failed' else 'retried' end,
            p_failure_code, d.lease_token_hash, d.holder
        from decided as d
    )
    select
        case when d.retry_at is null then 'failed' else 'queued' end,
        d.retry_at::timestamptz, d.queue
    into v_answer.status, v_answer.available_at, v_queue
    from decided as d;
    if v_answer.status = 'queued' and _queue_is_awaited(v_queue) then
        perform _queue_wake(v_queue);
    end if;
    if v_answer.status is not null then
        return v_answer;
    end if;

    select
        case a.outcome when 'retried' then 'queued' else 'failed' end, a.retry_at
    into v_answer
    from _lease_evidence(p_job_id, p_lease_token) as a
    where a.failure_code = p_failure_code collate "C" and a.retryable = p_retryable;
    if not found then
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;
    return v_answer;
end;
$$;
comment on function fail(uuid, text, text, boolean, integer) is
'Records a failed attempt. Returns queued with the time the job falls due, or failed '
'where it is not retryable or no attempt is left. A retry waits p_retry_after_seconds, '
'by default as long as the policy says, and never longer than retry_max_seconds. '
'Repeated with the same code and mark under the same lease it returns the same. '
'Refuses a malformed code, mark or wait (LJ005), a lease that is not live or not the '
'caller''s own (LJ004), and a retryable failure while no policy is stored (LJ008).';
create or replace function fail_many(
    p_job_ids uuid[], p_lease_tokens text[], p_failure_codes text[],
    p_retryable boolean[], p_retry_after_seconds integer[] default null
)
returns setof failed_item
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_batch(
        'job_ids, lease_tokens, failure_codes, retryable and retry_after_seconds',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:]),
        array_dims(p_failure_codes[:]), array_dims(p_retryable[:]),
        case
            when p_retry_after_seconds is null then array_dims(p_job_ids[:])
            else array_dims(p_retry_after_seconds[:])
        end
    );
    if true = any (p_retryable) then
        perform _require_policy();
    end if;
    return query select f.* from _lease_give_back(
        p_job_ids, p_lease_tokens, p_failure_codes[:], p_retryable[:],
        p_retry_after_seconds[:]
    ) as f;
end;
$$;
comment on function fail_many(uuid[], text[], text[], boolean[], integer[]) is
'Fails many attempts at once. Returns one row an item in input order: queued with the '
'time it falls due, failed, invalid_lease or invalid_failure. Refuses other than '
'parallel lists of 1 to 1000 items (LJ007) and a retryable failure while no policy is '
'stored (LJ008).';
create or replace function next_available_at(p_queue text)
returns timestamptz
language plpgsql stable security definer
set search_path from current as $$
declare
    v_queued  timestamptz;
    v_lapsing timestamptz;
    v_now     timestamptz := clock_timestamp();
    v_place   integer;
    v_paused  boolean;
    v_floor   regclass[];
    v_start   record;
begin
    select array_position(i.queues, p_queue collate "C"), i.floors,
        p_queue collate "C" = any (i.paused)
    into v_place, v_floor, v_paused
    from instance as i;
    if v_place is null then
        perform _require_queue(p_queue);
    end if;
    if v_paused then
        return null;
    end if;
    v_start := _claim_floor(_claim_floor_of(v_floor, v_place), v_now);

    select l.available_at::timestamptz into v_queued
    from live_job as l
    where l.queue = p_queue collate "C" and l.lease_expires_at is null
        and (l.available_at, l.job_id) > (v_start.at, v_start.id)
    order by l.available_at, l.job_id
    limit 1;
    v_now := clock_timestamp();
    if v_queued <= v_now then
        return v_queued;
    end if;

    -- Nothing is due, so every job before now is running, and only those are read. The
    -- next full scan finds what lies below the claim floor.
    select min(l.lease_expires_at)::timestamptz into v_lapsing
    from live_job as l
    where l.queue = p_queue collate "C" and l.available_at <= v_now
        and (l.available_at, l.job_id) > (v_start.at, v_start.id);
    return least(v_queued, v_lapsing, v_start.scan_at);
end;
$$;
comment on function next_available_at(text) is
'When the next job of a queue falls due, lapsing leases included; NULL while it is '
'empty or paused. For a worker''s sleep: slow while thousands run. While the queue has '
'a claim floor, no later than the next full scan. Refuses an undeclared queue (LJ003).';
create or replace function release(
    p_job_id uuid, p_lease_token text, p_delay_seconds integer default 0
)
returns failed_job
language plpgsql security definer
set search_path from current as $$
declare
    v_item failed_item;
begin
    perform _require_range('delay_seconds', p_delay_seconds, 0, 86400);

    v_item := release_many(
        array[p_job_id], array[p_lease_token], array[p_delay_seconds]
    );
    if v_item.outcome = 'invalid_lease' then
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended.';
    end if;
    if v_item.outcome = 'invalid_argument' then
        raise exception using errcode = 'LJ007',
            message = 'the job was released 100 times before',
            hint    = 'Complete it, or fail it: a failure uses up an attempt.';
    end if;
    return (v_item.outcome, v_item.available_at);
end;
$$;
comment on function release(uuid, text, integer) is
'Gives a lease back without using up the attempt: the job is queued again, with one '
'attempt more granted. Without a delay it keeps its place in the queue, else it falls '
'due after that many seconds. Returns queued and the time it falls due; repeated under '
'the same lease it returns the same. Refuses a lease that is not live or not the '
'caller''s own (LJ004), a delay outside 0 to 86400 seconds, a job that was released '
'100 times before (LJ007), and every call while no policy is stored (LJ008).';
create or replace function release_many(
    p_job_ids uuid[], p_lease_tokens text[], p_delays_seconds integer[]
)
returns setof failed_item
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_batch(
        'job_ids, lease_tokens and delays_seconds',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:]),
        array_dims(p_delays_seconds[:])
    );
    perform _require_policy();
    return query select r.* from _lease_give_back(
        p_job_ids, p_lease_tokens, null, null, p_delays_seconds[:]
    ) as r;
end;
$$;
comment on function release_many(uuid[], text[], integer[]) is
'Releases many leases at once. Returns one row an item in input order: queued with the '
'time the job falls due, invalid_lease, or invalid_argument where the delay is not 0 '
'to 86400 seconds or the job was released 100 times before. Refuses other than three '
'parallel lists of 1 to 1000 items (LJ007), and every call while no policy is stored '
'(LJ008).';
create or replace function renew(p_job_id uuid, p_lease_token text)
returns timestamptz
language plpgsql security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_expires_at timestamptz;
begin
    -- Only the caller's own lease is locked: a made-up token holds up nobody. The lock
    -- may be waited for, and so may the UPDATE's on the table, which judges the lease.
    perform
    from live_job as l
    where l.job_id = p_job_id
        and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
        and l.lease_owner = _caller()
    for update;
    if found then
        update live_job as l
        set lease_expires_at = greatest(
            l.lease_expires_at, clock_timestamp() + make_interval(secs => i.lease_seconds)
        )
        from instance as i
        where l.job_id = p_job_id and l.lease_expires_at > clock_timestamp()
        returning l.lease_expires_at::timestamptz into v_expires_at;
    end if;

    if v_expires_at is null then
        perform _require_policy();
        raise exception using errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: stop this work.';
    end if;
    return v_expires_at;
end;
$$;
comment on function renew(uuid, text) is
'Extends a live lease to the Instance''s lease_seconds from now and returns its new '
'end. A lease is never shortened. Refuses a lease that is not live or not the '
'caller''s own (LJ004), and every call while no policy is stored (LJ008).';
create or replace function renew_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof renewed_item
language plpgsql security definer
set search_path from current as $$
declare
    v_mine uuid[];
begin
    perform _require_policy();
    perform _require_batch(
        'job_ids and lease_tokens',
        array_dims(p_job_ids[:]), array_dims(p_lease_tokens[:])
    );

    -- A row that another session holds is passed over: waiting behind this worker's own
    -- uncommitted complete would let its other leases run out. One element an item,
    -- NULL where nothing was locked.
    select array_agg(m.job_id order by i.ordinality)
    into v_mine
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral (
        select l.job_id
        from live_job as l
        where l.job_id = i.job_id
            and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        for update skip locked
    ) as m on true;

    update live_job as l
    set lease_expires_at = greatest(
        l.lease_expires_at, clock_timestamp() + make_interval(secs => i.lease_seconds)
    )
    from instance as i
    where l.job_id = any (v_mine) and l.lease_expires_at > clock_timestamp();

    return query
    select i.ordinality::integer, i.job_id,
        case when i.mine is not null then l.lease_expires_at::timestamptz end,
        case
            when l.job_id is null then 'invalid_lease'
            when i.mine is null then 'busy'
            else 'renewed'
        end
    from unnest(p_job_ids, p_lease_tokens, v_mine)
    with ordinality as i (job_id, lease_token, mine)
    left join lateral (
        select e.* from live_job as e where e.job_id = i.job_id offset 0
    ) as l
        on
            l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
            and (i.mine is null or l.lease_expires_at > clock_timestamp())
    order by i.ordinality;
end;
$$;
comment on function renew_many(uuid[], text[]) is
'Renews many leases at once. Returns one row an item in input order: renewed with its '
'new end, invalid_lease, or busy where another session holds the job''s row at the '
'moment. Refuses other than two parallel lists of 1 to 1000 items (LJ007), and every '
'call while no policy is stored (LJ008).';
create or replace function wait_key(p_queue text)
returns bigint
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_policy();
    perform _require_queue(p_queue);
    return (select _queue_key(p_queue) from instance as i where i.notify);
end;
$$;
comment on function wait_key(text) is
'The advisory lock that a waiting worker holds, shared and by the try form, while it '
'listens on the channel named as the schema for the queue''s name; NULL where the '
'Instance sends no notifications. Refuses an undeclared queue (LJ003), and every call '
'while no policy is stored (LJ008).';
create or replace function explain_job(p_job_id uuid)
returns explained_job
language plpgsql stable security definer
set search_path from current as $$
declare
    v_answer explained_job;
begin
    if p_job_id is null then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'job_id must not be NULL.';
    end if;
    v_answer.job_id := p_job_id;

    select 'instance_damaged', t.subject, concat_ws(' ', t.subject, t.detail),
        'lenso-jobs check'
    into v_answer.reason, v_answer.who, v_answer.detail, v_answer.remedy
    from _catalogue_lost_table() as t;
    if v_answer.reason is null then
        v_answer := _explain_lock(v_answer, null);
    end if;
    if v_answer.reason is null then
        begin
            v_answer := _explain_row(v_answer);
        exception when undefined_column or undefined_table or undefined_function then
            v_answer := _explain_damage(v_answer);
        end;
    end if;

    -- The view may be what is lost.
    if (
        select t.subject from _catalogue_lost_table() as t
    ) is distinct from 'view explain_reason' then
        select r.meaning, coalesce(v_answer.remedy, r.remedy)
        into v_answer.meaning, v_answer.remedy
        from explain_reason as r
        where r.reason = v_answer.reason;
    end if;
    return v_answer;
end;
$$;
comment on function explain_job(uuid) is
'Why a job is not being claimed: one reason of explain_reason, with its facts, what it '
'means and what to do. Changes and locks nothing. Refuses NULL (LJ006).';
create or replace function inspect(p_job_id uuid)
returns inspected_job
language plpgsql stable security definer
set search_path from current as $$
declare
    v_answer inspected_job;
begin
    select r.* into v_answer from _inspect_row(p_job_id) as r;
    if not found or not _may_inspect(v_answer.producer) then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance or producer.';
    end if;
    return v_answer;
exception when insufficient_privilege or undefined_table then
    perform _require_tables();
    raise;
end;
$$;
comment on function inspect(uuid) is
'The durable evidence of one job: identity, status, attempts, lease and retry state, '
'last failure code; never its payload or key. Changes nothing. The status is lost if '
'somebody deleted rows by hand. Refuses an unknown job, and to a producer the job of '
'another producer (LJ006).';
create or replace function inspect_acts(
    p_limit integer default 100, p_before bigint default null
)
returns setof inspected_act
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_tables();
    perform _require_range('limit', p_limit, 1, 10000);

    return query
    select o.operator_act_id, o.acted_at, o.operator::text, o.act::text, o.arguments,
        o.job_count, o.login::text
    from operator_act as o
    where o.operator_act_id < coalesce(p_before, 9223372036854775807)
    order by o.operator_act_id desc
    limit p_limit;
end;
$$;
comment on function inspect_acts(integer, bigint) is
'The audit: the last operator acts, newest first; the next page is asked for with '
'act_id of the last row. Refuses other than 1 to 10000 rows (LJ007).';
create or replace function inspect_attempts(p_job_id uuid)
returns setof inspected_attempt
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_tables();
    if not exists (select from job as j where j.job_id = p_job_id) then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance.';
    end if;

    return query
    select a.attempt, a.worker::text, a.outcome::text, a.leased_at::timestamptz,
        null::timestamptz, a.ended_at::timestamptz, a.failure_code::text, a.retryable,
        a.retry_at::timestamptz, a.max_attempts, a.holder::text
    from attempt as a
    where a.job_id = p_job_id
    order by a.attempt;

    return query
    select l.attempt, l.lease_owner::text, 'running', l.leased_at::timestamptz,
        l.lease_expires_at::timestamptz, null::timestamptz, null, null::boolean,
        null::timestamptz, l.max_attempts, l.holder::text
    from live_job as l
    where l.job_id = p_job_id and l.lease_owner is not null;
end;
$$;
comment on function inspect_attempts(uuid) is
'The history of one job: one row an attempt, in order; the last is running while it '
'holds a lease, live or expired. Refuses an unknown job (LJ006).';
create or replace function inspect_failures(
    p_queue text default null, p_since timestamptz default null,
    p_limit integer default 100, p_failure_code text default null,
    p_before timestamptz default null, p_before_job_id uuid default null,
    p_kind text default null
)
returns setof inspected_failure
language plpgsql stable security definer
set search_path from current as $$
declare
    v_since         timestamptz := coalesce(p_since, timestamptz '-infinity');
    v_before        timestamptz := coalesce(p_before, timestamptz 'infinity');
    v_before_job_id uuid
    := coalesce(p_before_job_id, uuid '00000000-0000-0000-0000-000000000000');
begin
    perform _require_tables();
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    perform _require_range('limit', p_limit, 1, 10000);
    perform _require_kind(p_kind);
    if p_queue is not null then
        perform _require_queue(p_queue);
    end if;

    -- Two searches, each in the order of its own index, of which one finds nothing: a
    -- condition on the queue that may be NULL would use neither.
    return query
    select f.*
    from (
        select j.job_id, j.queue::text, j.kind::text, a.failure_code::text,
            a.worker::text, a.attempt, a.ended_at::timestamptz
        from (
            (
                select e.*
                from attempt as e
                where p_queue is null
                    and (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
                    and e.ended_at >= v_since
                    and (e.ended_at, e.job_id) < (v_before, v_before_job_id)
                order by e.ended_at desc, e.job_id desc
            )
            union all
            (
                select e.*
                from attempt as e
                where e.queue = p_queue collate "C"
                    and (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
                    and e.ended_at >= v_since
                    and (e.ended_at, e.job_id) < (v_before, v_before_job_id)
                order by e.ended_at desc, e.job_id desc
            )
        ) as a
        cross join lateral (
            select i.*
            from job as i
            where i.job_id = a.job_id
                and (select l.job_id from live_job as l where l.job_id = a.job_id)
                is null
                and a.attempt = (
                    select max(n.attempt) from attempt as n where n.job_id = a.job_id
                )
            offset 0
        ) as j
        where (p_failure_code is null or a.failure_code = p_failure_code collate "C")
            and (p_kind is null or j.kind = p_kind collate "C")
        limit p_limit
    ) as f
    order by f.ended_at desc, f.job_id desc;
end;
$$;
comment on function
inspect_failures(text, timestamptz, integer, text, timestamptz, uuid, text) is
'The jobs that have failed and were not redriven, newest first: of one queue or all '
'(NULL), since a time or ever (NULL), with one failure code or any (NULL), of one kind '
'or any (NULL). The next page is asked for with ended_at and job_id of the last row. '
'Refuses a queue that is not declared (LJ003), a malformed failure code (LJ005), a '
'malformed kind, and other than 1 to 10000 rows (LJ007).';
create or replace function inspect_health()
returns setof inspected_finding
language plpgsql stable security definer
set search_path from current as $$
declare
    v_parts text[] := array[
        'sessions', 'objects', 'roles', 'settings', 'history', 'queues', 'failures',
        'rows', 'storage', 'server'
    ];
begin
    return query
    select 'critical', 'object_changed', t.subject, null::timestamptz, t.detail,
        'lenso-jobs check'
    from _catalogue_lost_table() as t;
    if found then
        return;
    end if;

    -- Behind a lock on a whole table the other parts would wait, too.
    if (_explain_lock(null, null)).reason is not null then
        v_parts := array['sessions'];
    end if;

    return query
    select h.severity, f.finding, f.subject, f.since, f.detail,
        coalesce(f.remedy, h.remedy)
    from unnest(v_parts) as p (part)
    cross join lateral _health_part(p.part) as f
    join health_finding as h on h.finding = f.finding
    order by
        array_position(array['critical', 'warning', 'notice'], h.severity),
        -- Causes before what comes of them.
        f.finding in ('queue_silent', 'queue_behind', 'leases_expired'),
        f.finding, f.subject;
exception when others then
    return query
    select 'critical', 'object_changed', 'objects', null::timestamptz,
        'cannot be read: ' || sqlerrm, 'lenso-jobs check';
end;
$$;
comment on function inspect_health() is
'One row for each thing that is wrong: how bad, what, with which object, since when, '
'and what to do; none while all is well. health_finding lists them all. For since when '
'transactions of other roles are open, the owner needs pg_read_all_stats.';
create or replace function inspect_jobs(
    p_queue text, p_status text, p_kind text default null,
    p_limit integer default 100, p_before uuid default null
)
returns setof inspected_job
language plpgsql stable security definer
set search_path from current as $$
declare
    v_before  uuid := coalesce(p_before, uuid 'ffffffff-ffff-ffff-ffff-ffffffffffff');
    v_job_ids uuid[];
    v_count   integer;
    v_mark    inspected_job;
begin
    perform _require_tables();
    perform _require_queue(p_queue);
    if
        (
            p_status collate "C"
            = any (array['queued', 'running', 'succeeded', 'failed', 'lost'])
        ) is not true
    then
        raise exception using errcode = 'LJ007',
            message = 'status must be queued, running, succeeded, failed or lost';
    end if;
    perform _require_kind(p_kind);
    perform _require_range('limit', p_limit, 1, 10000);

    -- Live jobs are few among all jobs.
    if p_status collate "C" = any (array['queued', 'running']) then
        v_job_ids := array(
            select l.job_id
            from live_job as l
            where l.job_id < v_before
            order by l.job_id desc
            limit 10000
        );
    else
        v_job_ids := array(
            select j.job_id
            from job as j
            where j.job_id < v_before
            order by j.job_id desc
            limit 10000
        );
    end if;

    -- Behind the fence each job is found by its key, in the order of the ids. A join,
    -- planned while the tables were empty, would read all jobs for each id.
    return query
    select f.*
    from (
        select r.*
        from unnest(v_job_ids) as u (job_id)
        cross join lateral (
            select i.* from _inspect_row(u.job_id) as i offset 0
        ) as r
        where r.queue = p_queue collate "C"
            and r.status = p_status collate "C"
            and (p_kind is null or r.kind = p_kind collate "C")
        limit p_limit
    ) as f
    order by f.job_id desc;
    get diagnostics v_count = row_count;
    if v_count < p_limit and cardinality(v_job_ids) = 10000 then
        v_mark.job_id := v_job_ids[10000];
        return next v_mark;
    end if;
end;
$$;
comment on function inspect_jobs(text, text, text, integer, uuid) is
'The jobs of a queue that are queued, running, succeeded, failed or lost, newest '
'first, of one kind or any (NULL). A call looks at 10000 jobs of all queues at most; '
'if more are left, a last row has nothing but a job_id. The next page is asked for '
'with job_id of the last row. Refuses a queue that is not declared (LJ003), another '
'status, a malformed kind, and other than 1 to 10000 rows (LJ007).';
create or replace function inspect_key(
    p_idempotency_key text, p_producer text default null
)
returns inspected_job
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_tables();

    -- In an old snapshot a purged job may be visible beside the newer one.
    return inspect(
        (
            select j.job_id
            from (
                select i.job_id
                from job as i
                where i.producer = coalesce(p_producer, _caller()) collate "C"
                    and i.idempotency_key = p_idempotency_key collate "C"
                offset 0
            ) as j
            order by j.job_id desc
            limit 1
        )
    );
end;
$$;
comment on function inspect_key(text, text) is
'What inspect returns, for the job that a producer enqueued under a key; by default '
'the caller''s own. Refuses an unknown key, and to a producer the key of another '
'producer (LJ006).';
create or replace function inspect_queues()
returns setof inspected_queue
language plpgsql stable security definer
set search_path from current as $$
declare
    v_now   timestamptz      := clock_timestamp();
    v_from  timestamptz      := v_now - interval '5 minutes';
    v_share real             := _queue_share_to_read();
    v_scale double precision := 100 / v_share;
begin
    perform _require_tables();

    return query
    with live as materialized (
        select l.queue,
            count(*) filter (where w.is_free and l.available_at <= v_now) as ready,
            count(*) filter (where w.is_later and l.last_failure_code is null) as scheduled,
            count(*) filter (where w.is_later and l.last_failure_code is not null)
            as retry_waiting,
            count(*) filter (where l.lease_expires_at > v_now) as running,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            count(*) filter (
                where _lease_is_broken(
                    l.leased_at, l.lease_expires_at, l.lease_owner, l.lease_token_hash
                )
            ) as broken,
            min(l.lease_expires_at) filter (where l.lease_expires_at <= v_now)
            as oldest_lapse_at,
            min(l.leased_at) filter (where l.lease_expires_at > v_now) as oldest_leased_at,
            max(l.leased_at) as last_claimed_at
        from live_job as l tablesample system (v_share)
        cross join lateral (
            select l.lease_owner is null, l.lease_owner is null and l.available_at > v_now
        ) as w (is_free, is_later)
        group by l.queue
    ),
    ends as materialized (select e.* from _queue_ends(v_from) as e),
    ended as (
        select e.queue, max(e.leased_at) as last_claimed_at,
            count(*) filter (where not e.has_failed) as succeeded,
            count(*) filter (where e.has_failed) as failed
        from ends as e
        group by e.queue
    ),
    codes as (
        select c.queue, jsonb_object_agg(c.failure_code, c.number) as numbers
        from (
            select e.queue, e.failure_code, count(*) as number
            from ends as e
            where e.has_failed
            group by e.queue, e.failure_code
        ) as c
        group by c.queue
    )
    select n.queue::text,
        exists (select from queue as q where q.queue = n.queue), v_share < 100,
        coalesce(round(l.ready * v_scale), 0)::bigint,
        coalesce(round(l.scheduled * v_scale), 0)::bigint,
        coalesce(round(l.retry_waiting * v_scale), 0)::bigint,
        coalesce(round(l.running * v_scale), 0)::bigint,
        coalesce(round(l.expired * v_scale), 0)::bigint,
        v_now - (
            select r.available_at::timestamptz
            from live_job as r
            where r.queue = n.queue
                and r.available_at <= v_now
                and r.lease_expires_at is null
            order by r.available_at, r.job_id
            limit 1
        ),
        least(l.oldest_lapse_at, h.oldest_lapse_at),
        (
            select r.available_at::timestamptz
            from live_job as r
            where r.queue = n.queue and r.available_at > v_now
            order by r.available_at, r.job_id
            limit 1
        ),
        greatest(l.last_claimed_at, h.last_claimed_at, e.last_claimed_at),
        case (select count(*) from ends)
            when 10000 then (select min(x.ended_at) from ends as x) else v_from
        end,
        coalesce(e.succeeded, 0), coalesce(e.failed, 0),
        coalesce(c.numbers, '{}'), _session_waiting(n.queue),
        coalesce(greatest(round(l.broken * v_scale)::bigint, h.broken), 0),
        least(l.oldest_leased_at, h.oldest_leased_at),
        (select q.paused_at from queue as q where q.queue = n.queue)
    from (select q.queue from queue as q union select v.queue from live as v) as n
    left join live as l on l.queue = n.queue
    left join ended as e on e.queue = n.queue
    left join codes as c on c.queue = n.queue
    -- A sample may miss the few that run, which lie where claims begin.
    left join lateral (
        select f.* from _queue_front(n.queue, v_now) as f where v_share < 100
    ) as h on true
    order by 1;
end;
$$;
comment on function inspect_queues() is
'Each declared queue, and each that still has live jobs: how many are in which state, '
'how long the oldest ready one waits, when the next falls due, how the last ones ended '
'(of 5 minutes, or the last 10000 ends where those are fewer), how many workers wait. '
'Reads the live jobs, at most 64 MB of them.';
create or replace function inspect_workers()
returns setof inspected_worker
language plpgsql stable security definer
set search_path from current as $$
declare
    v_now   timestamptz := clock_timestamp();
    v_share real        := _queue_share_to_read();
begin
    perform _require_tables();

    return query
    with held as (
        select l.lease_owner, count(*) as leases,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            min(l.leased_at) as oldest_leased_at,
            min(l.lease_expires_at) filter (where l.lease_expires_at > v_now)
            as next_lease_expires_at,
            (array_agg(l.job_id order by l.leased_at, l.job_id))[1] as oldest_job_id,
            (array_agg(l.holder order by l.leased_at, l.job_id))[1] as oldest_holder
        from live_job as l tablesample system (v_share)
        where l.lease_owner is not null
        group by l.lease_owner
    )
    select coalesce(w.worker, h.lease_owner), w.worker is not null, v_share < 100,
        coalesce(round(h.leases * 100 / v_share)::bigint, 0),
        coalesce(round(h.expired * 100 / v_share)::bigint, 0),
        h.oldest_leased_at::timestamptz, h.next_lease_expires_at::timestamptz,
        case when w.worker is null then 0 else w.sessions end, h.oldest_job_id,
        h.oldest_holder::text
    from _session_workers() as w
    full join held as h on h.lease_owner = w.worker
    order by 1;
end;
$$;
comment on function inspect_workers() is
'Each declared worker, and each that still holds leases: how many, the oldest and its '
'job, when the next one ends, and how many sessions may act as it. Reads the live '
'jobs, at most 64 MB of them.';
-- Runs with the rights of its caller, and only the owner may.
create or replace function configure(
    p_document jsonb, p_drop_queues boolean default false
)
returns boolean
language plpgsql
set search_path from current
set lock_timeout = '5s'
as $$
declare
    v_fault   text   := _document_fault(p_document, current_schema());
    v_queues  text[];
    v_before  jsonb;
    v_changes jsonb;
begin
    if v_fault is not null then
        raise exception using errcode = 'LJ007', message = v_fault;
    end if;
    if p_drop_queues is null then
        raise exception using errcode = 'LJ007',
            message = 'whether to drop queues that have live jobs must be said';
    end if;
    -- An older snapshot would not show the jobs of a queue that is left out.
    if current_setting('transaction_isolation') not like 'read %' then
        raise exception using errcode = 'LJ007',
            message = 'configure needs a transaction at READ COMMITTED';
    end if;

    lock table instance in share row exclusive mode;
    v_before := _document_stored();
    insert into instance (
        lease_seconds, retry_base_seconds, retry_max_seconds,
        retry_jitter, notify, retention_seconds
    )
    values (
        (p_document -> 'lease_seconds')::integer,
        (p_document -> 'retry_base_seconds')::integer,
        (p_document -> 'retry_max_seconds')::integer,
        coalesce((p_document ->> 'retry_jitter')::double precision, 0),
        coalesce((p_document ->> 'notify')::boolean, true),
        (p_document ->> 'retention_seconds')::bigint
    )
    on conflict (is_only) do update
    set
        lease_seconds = excluded.lease_seconds,
        retry_base_seconds = excluded.retry_base_seconds,
        retry_max_seconds = excluded.retry_max_seconds,
        retry_jitter = excluded.retry_jitter,
        notify = excluded.notify,
        retention_seconds = excluded.retention_seconds,
        configured_at = excluded.configured_at;

    v_queues := array(
        select q.value from jsonb_array_elements_text(p_document -> 'queues') as q
    );
    if not p_drop_queues then
        perform _require_no_jobs_outside(v_queues);
    end if;
    delete from queue as q where q.queue <> all (v_queues);
    insert into queue (queue)
    select q.queue from unnest(v_queues) as q (queue)
    on conflict (queue) do nothing;
    perform _claim_floors_made();

    with declared as (
        select n.name as caller,
            bool_or(k.field = 'producer_instances') as is_producer,
            bool_or(k.field = 'worker_instances') as is_worker,
            bool_or(k.field = 'observer_instances') as is_observer
        from unnest(array[
            'producer_instances', 'worker_instances', 'observer_instances'
        ]) as k (field)
        cross join lateral jsonb_array_elements_text(p_document -> k.field) as n (name)
        group by n.name
    ),
    gone as (
        delete from caller as c
        where c.caller not in (select d.caller from declared as d)
    )
    insert into caller as c (caller, is_producer, is_worker, is_observer)
    select d.caller, d.is_producer, d.is_worker, d.is_observer from declared as d
    on conflict (caller) do update
    set
        is_producer = excluded.is_producer,
        is_worker = excluded.is_worker,
        is_observer = excluded.is_observer;

    -- The audit shows observers what changed, and never where the database's URL is kept.
    select jsonb_object_agg(
        n.field, jsonb_build_object('from', v_before -> n.field, 'to', n.value)
    )
    into v_changes
    from jsonb_each(_document_stored()) as n (field, value)
    where n.value is distinct from v_before -> n.field;
    if v_changes is not null then
        insert into operator_act (operator, act, arguments, job_count)
        values (_caller(), 'configure', v_changes, 0);
    end if;
    return v_changes is not null;
exception when check_violation or numeric_value_out_of_range then
    raise exception using errcode = 'LJ007',
        message = format('a value of the document is out of range: %s', sqlerrm);
end;
$$;
comment on function configure(jsonb, boolean) is
'Stores policy, queues and callers as the configuration document has them, and returns '
'whether anything changed; audited. For the owner alone; memberships are '
'bootstrap.sql''s. Refuses unknown fields, another schema''s document, and to leave '
'out a queue that has live jobs (LJ007), unless the second argument says to drop it: '
'the jobs stay, and wait until the queue is declared again.';
create or replace function enforce_retention(p_limit integer default 1000)
returns integer
language plpgsql security definer
set search_path from current as $$
declare
    v_before timestamptz;
begin
    perform _require_range('limit', p_limit, 1, 10000);

    select clock_timestamp() - make_interval(secs => i.retention_seconds)
    into v_before
    from instance as i;
    if not found then
        perform _require_policy();
    end if;
    if v_before is null then
        return 0;
    end if;

    -- The audit outlives the jobs: what was done to them is asked for later.
    delete from operator_act as o
    where o.operator_act_id in (
        select a.operator_act_id
        from (
            select k.* from operator_act as k order by k.operator_act_id limit p_limit
        ) as a
        where a.acted_at < least(v_before, clock_timestamp() - interval '400 days')
    );
    return purge(v_before, p_limit);
end;
$$;
comment on function enforce_retention(integer) is
'Purges up to p_limit jobs that ended longer than retention_seconds ago and returns '
'how many: 0 where none is set. Deletes up to p_limit operator acts older than 400 '
'days, or than retention_seconds where that is longer. For any scheduler: call it '
'until it returns fewer than p_limit. Audited as purge. Refuses other than 1 to 10000 '
'jobs (LJ007), and every call while no policy is stored (LJ008).';
create or replace function erase(p_job_id uuid)
returns boolean
language plpgsql security definer
set search_path from current as $$
begin
    -- A redrive locks the row, too: the next statement sees what it did.
    perform from job as j where j.job_id = p_job_id for update;
    if not found then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance.';
    end if;
    if exists (select from live_job as l where l.job_id = p_job_id) then
        raise exception using errcode = 'LJ007',
            message = 'the job has not ended',
            hint    = 'Only a job that succeeded or failed can be erased.';
    end if;

    delete from attempt as a where a.job_id = p_job_id;
    delete from job as j where j.job_id = p_job_id;
    insert into operator_act (operator, act, arguments, job_count)
    values (_caller(), 'erase', jsonb_build_object('job_id', p_job_id), 1);
    return true;
end;
$$;
comment on function erase(uuid) is
'Deletes one job that has ended, with its payload, evidence and key, as a request for '
'data protection asks for; audited by its id. Returns true. Refuses an unknown job '
'(LJ006), and one that is queued or running (LJ007).';
create or replace function pause(p_queue text)
returns boolean
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_policy();

    -- As configure does. Otherwise the row of the queue is locked before the policy's.
    lock table instance in share row exclusive mode;
    perform _require_queue(p_queue);
    update queue as q
    set paused_at = clock_timestamp(), paused_by = _caller()
    where q.queue = p_queue collate "C" and q.paused_at is null;
    if not found then
        return false;
    end if;
    insert into operator_act (operator, act, arguments, job_count)
    values (_caller(), 'pause', jsonb_build_object('queue', p_queue), 0);
    return true;
end;
$$;
comment on function pause(text) is
'Stops claims of a queue: they return no row until resume. Jobs that run go on, and '
'jobs are enqueued as before. Returns false if the queue was paused already; audited '
'else. Refuses an undeclared queue (LJ003), and every call while no policy is stored '
'(LJ008).';
create or replace function purge(p_before timestamptz, p_limit integer default 1000)
returns integer
language plpgsql security definer
set search_path from current as $$
declare
    v_job_ids uuid[];
    v_count   integer;
begin
    if (isfinite(p_before) and p_before <= clock_timestamp()) is not true then
        raise exception using errcode = 'LJ007',
            message = 'before must be a finite time that has passed';
    end if;
    perform _require_range('limit', p_limit, 1, 10000);

    -- Lookups are fenced or scalar: as joins, planned while the tables were empty, they
    -- would be walks.
    v_job_ids := array(
        select j.job_id
        from (
            select e.job_id, e.attempt
            from attempt as e
            where e.ended_at < p_before
                and (
                    e.outcome in ('succeeded', 'failed')
                    or e.failure_code = 'attempts_exhausted'
                )
            order by e.ended_at
        ) as a
        cross join lateral (
            select i.job_id
            from job as i
            where i.job_id = a.job_id
                and a.attempt = (
                    select max(n.attempt) from attempt as n where n.job_id = a.job_id
                )
                and (select l.job_id from live_job as l where l.job_id = a.job_id)
                is null
            offset 0
            for update skip locked
        ) as j
        limit p_limit
    );

    -- Between the look and the lock a job may have been redriven, and even have ended
    -- anew: a statement of its own sees that.
    with gone as (
        delete from job as j
        where j.job_id = any (v_job_ids)
            and (select l.job_id from live_job as l where l.job_id = j.job_id) is null
            and p_before > (
                select max(a.ended_at) from attempt as a where a.job_id = j.job_id
            )
        returning j.job_id
    )
    select array_agg(g.job_id), count(*)::integer into v_job_ids, v_count
    from gone as g;
    delete from attempt as a where a.job_id = any (v_job_ids);

    if v_count > 0 then
        insert into operator_act (operator, act, arguments, job_count)
        values (
            _caller(), 'purge',
            jsonb_build_object('before', p_before, 'limit', p_limit), v_count
        );
    end if;
    return v_count;
end;
$$;
comment on function purge(timestamptz, integer) is
'Deletes up to p_limit jobs that ended before the given time, oldest end first, with '
'their evidence and keys, and returns how many; audited. Call it until it returns 0. '
'Refuses a cut-off that is NULL, infinite or yet to come, and other than 1 to 10000 '
'jobs (LJ007).';
create or replace function redrive(p_job_id uuid, p_extra_attempts integer default 1)
returns failed_job
language plpgsql security definer
set search_path from current as $$
declare
    v_jobs   integer;
    v_due_at timestamptz;
begin
    perform _require_policy();
    perform _require_range('extra_attempts', p_extra_attempts, 1, 100);

    select q.jobs, q.available_at into v_jobs, v_due_at
    from _redrive_jobs(array[p_job_id], p_extra_attempts, 0) as q;
    if not exists (select from job as j where j.job_id = p_job_id) then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance.';
    end if;
    if v_jobs = 0 then
        raise exception using errcode = 'LJ007',
            message = 'the job has not failed',
            hint    = 'Only a job whose status is failed can be redriven. lenso-jobs '
                      'explain says how to put a lost job back.';
    end if;
    perform _queue_wake(j.queue)
    from job as j
    where j.job_id = p_job_id and _queue_is_awaited(j.queue);

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'redrive',
        jsonb_build_object('job_id', p_job_id, 'extra_attempts', p_extra_attempts), 1
    );
    return ('queued'::text, v_due_at);
end;
$$;
comment on function redrive(uuid, integer) is
'Queues a failed job again with that many more attempts, its history kept and its '
'fencing token still growing; audited. Refuses an unknown job (LJ006), a job that has '
'not failed, and other than 1 to 100 attempts (LJ007).';
create or replace function redrive_failed(
    p_queue text, p_since timestamptz, p_before timestamptz default null,
    p_failure_code text default null, p_limit integer default 100,
    p_extra_attempts integer default 1, p_over_seconds integer default 0,
    p_kind text default null
)
returns integer
language plpgsql security definer
set search_path from current as $$
declare
    v_job_ids uuid[];
    v_count   integer;
begin
    perform _require_policy();
    perform _require_queue(p_queue);
    if p_since is null then
        raise exception using errcode = 'LJ007',
            message = 'since must not be NULL',
            hint    = 'A job that failed before that time is left alone.';
    end if;
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    perform _require_range('limit', p_limit, 1, 10000);
    perform _require_range('extra_attempts', p_extra_attempts, 1, 100);
    perform _require_range('over_seconds', p_over_seconds, 0, 86400);
    perform _require_kind(p_kind);

    v_job_ids := array(
        select j.job_id
        from (
            select e.job_id, e.attempt
            from attempt as e
            where
                e.queue = p_queue collate "C"
                and (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
                and e.ended_at >= p_since
                and e.ended_at < coalesce(p_before, 'infinity')
                and (
                    p_failure_code is null
                    or e.failure_code = p_failure_code collate "C"
                )
            order by e.ended_at, e.job_id
        ) as a
        cross join lateral (
            select i.job_id
            from job as i
            where i.job_id = a.job_id
                and (p_kind is null or i.kind = p_kind collate "C")
                and a.attempt = (
                    select max(n.attempt) from attempt as n where n.job_id = a.job_id
                )
                and (select l.job_id from live_job as l where l.job_id = a.job_id)
                is null
            offset 0
            for update skip locked
        ) as j
        limit p_limit
    );

    -- A separate statement sees what happened between the look and the lock.
    select q.jobs into v_count
    from _redrive_jobs(v_job_ids, p_extra_attempts, p_over_seconds) as q;
    if v_count > 0 then
        perform _queue_wake(p_queue) where _queue_is_awaited(p_queue);
        insert into operator_act (operator, act, arguments, job_count)
        values (
            _caller(), 'redrive_failed',
            jsonb_build_object(
                'queue', p_queue, 'since', p_since, 'before', p_before,
                'failure_code', p_failure_code, 'limit', p_limit,
                'extra_attempts', p_extra_attempts, 'over_seconds', p_over_seconds,
                'kind', p_kind
            ),
            v_count
        );
    end if;
    return v_count;
end;
$$;
comment on function
redrive_failed(text, timestamptz, timestamptz, text, integer, integer, integer, text) is
'Queues up to p_limit failed jobs of a queue again, oldest failure first: those that '
'failed since a time and before another or ever (NULL), with one failure code or any '
'(NULL), of one kind or any (NULL). Each gets that many more attempts. They fall due '
'evenly over p_over_seconds, so that jobs enqueued meanwhile are claimed between them; '
'by default all at once, and then later jobs wait behind them. Returns how many; '
'audited. Refuses a queue that is not declared (LJ003), a malformed failure code '
'(LJ005), a NULL since, other than 1 to 10000 jobs, 1 to 100 attempts or 0 to 86400 '
'seconds, a malformed kind (LJ007), and every call while no policy is stored (LJ008).';
create or replace function resume(p_queue text)
returns boolean
language plpgsql security definer
set search_path from current as $$
begin
    perform _require_policy();

    lock table instance in share row exclusive mode;
    perform _require_queue(p_queue);
    update queue as q
    set paused_at = null, paused_by = null
    where q.queue = p_queue collate "C" and q.paused_at is not null;
    if not found then
        return false;
    end if;
    perform _queue_wake(p_queue) where _queue_is_awaited(p_queue);
    insert into operator_act (operator, act, arguments, job_count)
    values (_caller(), 'resume', jsonb_build_object('queue', p_queue), 0);
    return true;
end;
$$;
comment on function resume(text) is
'Lets workers claim jobs of a paused queue again, and wakes those that wait. Returns '
'false if the queue was not paused; audited else. Refuses an undeclared queue (LJ003), '
'and every call while no policy is stored (LJ008).';
create or replace function retire_expired(p_limit integer default 1000)
returns integer
language plpgsql security definer
set search_path from current
set jit = off
as $$
declare
    v_count integer;
begin
    perform _require_range('limit', p_limit, 1, 10000);

    -- No index leads here, since every claim would write an index on the lease: this
    -- reads all live rows, for an operator's hand and not for a loop.
    v_count := _claim_reclaim(
        array(
            select l.job_id
            from live_job as l
            where l.attempt >= l.max_attempts
                and (
                    l.lease_expires_at is null
                    or l.lease_expires_at <= clock_timestamp()
                )
            limit p_limit
            for update skip locked
        ),
        p_limit
    );

    if v_count > 0 then
        insert into operator_act (operator, act, arguments, job_count)
        values (
            _caller(), 'retire_expired', jsonb_build_object('limit', p_limit), v_count
        );
    end if;
    return v_count;
end;
$$;
comment on function retire_expired(integer) is
'Ends up to p_limit jobs whose last attempt''s lease ran out, as claim does while it '
'passes, and returns how many; audited. Refuses other than 1 to 10000 jobs (LJ007).';
-- Tables may have any size, and statistics any age. These functions use indexes and
-- nested loops under all statistics and all settings of the session. The verbs for one
-- job pin less, in their own files: a setting costs half a microsecond.
do $$
declare
    v_function text;
    v_more     text;
begin
    for v_function, v_more in
        select p.oid::regprocedure::text,
            case
                when p.proname ~ '^(_lease_give_back|.*_many)$'
                    then 'set enable_tidscan = on'
                else 'set enable_sort = off set enable_incremental_sort = off'
            end
        from pg_proc as p
        join pg_namespace as n on n.oid = p.pronamespace
        where n.nspname = current_schema()
            and p.proname ~ (
                '^(_lease_give_back|(enqueue|renew|complete)_many|wait_key'
                '|inspect.*|explain_job|next_available_at'
                '|purge|enforce_retention|redrive|redrive_failed|pause|resume|erase)$'
            )
    loop
        execute format(
            'alter function %s'
            ' set plan_cache_mode = force_generic_plan set jit = off'
            ' set enable_seqscan = off set enable_bitmapscan = off'
            ' set enable_hashjoin = off set enable_mergejoin = off'
            ' set enable_nestloop = on set enable_indexscan = on %s',
            v_function, v_more
        );
    end loop;
end $$;
-- Takes every right on the Instance's objects from everybody but the owner, then gives
-- what _catalogue_grants lists. The roles are found through the schema's owner, so that
-- no file names an Instance.
do $$
declare
    v_schema text := current_schema();
    v_owner  text := (
        select pg_get_userbyid(n.nspowner)
        from pg_namespace as n
        where n.nspname = v_schema
    );
    v_change text;
begin
    -- Names are compared with names that were quoted where they need it.
    perform set_config('quote_all_identifiers', 'off', true);

    for v_change in
        select distinct format('revoke all on %s from %s cascade', g.place, g.grantee)
        from _catalogue_objects(v_schema) as o
        cross join lateral (
            select o.facts ->> 'place', w.word
            from jsonb_array_elements_text(o.facts -> 'grants') as w (word)
            union all
            select format('type %I.%I', v_schema, o.name), w.word
            from jsonb_array_elements_text(o.facts -> 'type grants') as w (word)
        ) as r (place, word)
        cross join lateral (
            select r.place, substring(r.word from '^(.*) [A-Z]+(?: with grant option)?$')
        ) as g (place, grantee)
        where g.grantee <> quote_ident(v_owner)
    loop
        begin
            execute v_change;
        exception when insufficient_privilege then
            null;  -- the object belongs to another role, which check reports
        end;
    end loop;

    for v_change in
        select
            format(
                'grant %s on %s to %I', g.privilege, o.facts ->> 'place',
                left(v_owner, -5) || g.role_kind
            )
        from _catalogue_grants() as g
        join _catalogue_objects(v_schema) as o
            on g.object in (o.kind, o.kind || ' ' || o.name)
    loop
        execute v_change;
    end loop;
end $$;
-- A migration is applied by several tools, and none of them compares objects. What is
-- here now is taken for sound only if it was sound before the migration, which
-- 0_open.sql found. Else the digest is NULL, and inspect_health asks for lenso-jobs
-- check.
select _catalogue_store_digest(current_setting('lenso_jobs.was_sound', true) = 'true');
