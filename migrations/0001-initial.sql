-- Every migration opens with these two statements, and they name no Instance: the
-- schema is the one the connection's search_path selects, its owner the role that
-- bootstrap.sql made, and from here on everything is made by that role in that schema.
set local lock_timeout = '5s';

do $$
declare
    v_schema text := current_schema();
    v_owner  text := (
        select pg_get_userbyid(n.nspowner)
        from pg_namespace as n
        where n.nspname = current_schema()
    );
begin
    -- What a connection that names no Instance has in its search_path is not to be
    -- trusted with a function call.
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

    -- Outside a transaction the first statement, and all that is set below, is
    -- forgotten at once, and the rest would be made by whoever is connected.
    if current_setting('lock_timeout') <> '5s' then
        raise exception using
            errcode = 'LJ008',
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
        raise exception using
            errcode = 'LJ008',
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
end $$;
-- CREATE TYPE knows no IF NOT EXISTS, and a migration may be applied a second time.
--
-- What must hold of one column of a hot table is a domain's constraint: the session
-- compiles it once. A table's CHECK is parsed anew by every statement that writes a
-- row, 2 to 4 microseconds each, so those that remain say what takes two columns.
do $$
declare
    v_schema text := current_schema();
begin
    if to_regtype(format('%I.instant', v_schema)) is null then
        create domain instant as timestamptz
            constraint instant_is_finite check (isfinite(value));
    end if;

    if to_regtype(format('%I.asked_attempts', v_schema)) is null then
        create domain asked_attempts as integer
            constraint asked_attempts_in_range check (value between 1 and 100);
    end if;

    if to_regtype(format('%I.object_payload', v_schema)) is null then
        create domain object_payload as jsonb
            constraint object_payload_is_an_object
            check (jsonb_typeof(value) = 'object');
    end if;

    if to_regtype(format('%I.attempt_outcome', v_schema)) is null then
        create domain attempt_outcome as text collate "C"
            constraint attempt_outcome_is_known check (
                value in ('succeeded', 'retried', 'failed', 'lease_expired')
            );
    end if;

    if to_regtype(format('%I.enqueued_job', v_schema)) is null then
        create type enqueued_job as (
            job_id  uuid,
            created boolean
        );
    end if;

    if to_regtype(format('%I.enqueued_item', v_schema)) is null then
        create type enqueued_item as (
            position integer,
            job_id   uuid,
            outcome  text
        );
    end if;

    if to_regtype(format('%I.leased_job', v_schema)) is null then
        create type leased_job as (
            job_id           uuid,
            queue            text,
            kind             text,
            payload          jsonb,
            attempt          integer,
            max_attempts     integer,
            lease_token      text,
            lease_expires_at timestamptz,
            created_at       timestamptz
        );
    end if;

    if to_regtype(format('%I.renewed_item', v_schema)) is null then
        create type renewed_item as (
            position         integer,
            job_id           uuid,
            lease_expires_at timestamptz,
            outcome          text
        );
    end if;

    if to_regtype(format('%I.completed_item', v_schema)) is null then
        create type completed_item as (
            position integer,
            job_id   uuid,
            outcome  text
        );
    end if;

    if to_regtype(format('%I.failed_job', v_schema)) is null then
        create type failed_job as (
            status       text,
            available_at timestamptz
        );
    end if;

    if to_regtype(format('%I.failed_item', v_schema)) is null then
        create type failed_item as (
            position     integer,
            job_id       uuid,
            outcome      text,
            available_at timestamptz
        );
    end if;

    if to_regtype(format('%I.inspected_job', v_schema)) is null then
        create type inspected_job as (
            job_id            uuid,
            queue             text,
            kind              text,
            status            text,
            attempts          integer,
            max_attempts      integer,
            available_at      timestamptz,
            lease_expires_at  timestamptz,
            last_failure_code text,
            created_at        timestamptz,
            updated_at        timestamptz,
            producer          text,
            worker            text,
            ended_at          timestamptz
        );
    end if;
end $$;

comment on domain instant is 'A time that is never infinity.';
comment on domain asked_attempts is 'How many attempts a producer may ask for.';
comment on domain object_payload is 'A payload: any JSON object.';
comment on domain attempt_outcome is 'How an attempt ended.';
comment on type enqueued_job is
'What enqueue answers: the job, and whether this call created it.';
comment on type enqueued_item is
'One item of enqueue_many, by its position from 1: created, existing, conflict or '
'invalid_job; job_id is NULL for the last two.';
comment on type leased_job is
'What claim answers: the job, its attempt (the fencing token), and the lease.';
comment on type renewed_item is
'One item of renew_many, by its position from 1: renewed, invalid_lease or busy.';
comment on type completed_item is
'One item of complete_many, by its position from 1: completed or invalid_lease.';
comment on type failed_job is
'What fail and redrive answer: queued with the time the job falls due, or failed.';
comment on type failed_item is
'One item of fail_many, by its position from 1: queued, failed, invalid_lease or '
'invalid_failure.';
comment on type inspected_job is
'What inspect answers: the durable evidence of one job, without payload or key.';
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
'How long ended jobs are meant to be kept; NULL: for ever. Recorded; nothing is purged '
'unless somebody calls purge.';

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

create table if not exists operator_act (
    operator_act_id bigint           not null generated always as identity,
    acted_at        timestamptz      not null default clock_timestamp(),
    operator        text collate "C" not null,
    act             text collate "C" not null,
    arguments       jsonb            not null,
    job_count       integer          not null,

    constraint operator_act_pkey primary key (operator_act_id)
);
comment on table operator_act is
'The audit: who did which operator act, when, with what arguments, on how many jobs.';
-- In the form that a dump gives it, so that a restored Instance compares equal.
create or replace view error_code as
select e.sqlstate, e.name, e.meaning
from (
    values
        (
            '42501'::text, 'unauthorized'::text,
            'The role may not call this function, or is not a declared caller.'::text
        ),
        (
            'LJ001', 'invalid_job',
            'An argument of enqueue is out of bounds, or the queue is not declared.'
        ),
        (
            'LJ002', 'idempotency_conflict',
            'The producer has used this idempotency key for another intent.'
        ),
        ('LJ003', 'invalid_queue', 'The queue is not declared.'),
        (
            'LJ004', 'invalid_lease',
            'The lease has expired, was superseded, has ended, or never was.'
        ),
        (
            'LJ005', 'invalid_failure',
            'The failure code or its retryable mark is malformed.'
        ),
        ('LJ006', 'job_not_found', 'No such job; it may have been purged.'),
        (
            'LJ007', 'invalid_argument',
            'A limit, cut-off, array or document is out of range.'
        ),
        (
            'LJ008', 'schema_not_ready',
            'The schema is missing, older or newer than the client, or has drifted.'
        )
) as e (sqlstate, name, meaning);
comment on view error_code is
'Every SQLSTATE that is refused on purpose. Codes are only ever added.';
comment on column error_code.sqlstate is 'What the driver reports.';
comment on column error_code.name is 'The stable name, the same in every language.';

create or replace view installed_version as
select v.version
from (values (1)) as v (version);
comment on view installed_version is
'The version of this schema: the number of the last migration that changed it.';
-- The table's oid tells this Instance from another in the same database. The inliner
-- makes a constant of it.
create or replace function _advisory_key(p_queue text)
returns bigint
language sql
stable
as $$
    select hashtextextended(p_queue collate "C", 'instance'::regclass::oid::bigint)
$$;
comment on function _advisory_key(text) is
'The number of a queue: its advisory lock, and the name of its claim floor.';
-- current_user is the owner inside a definer function, and session_user ignores SET
-- ROLE. The role setting cannot be forged: setting it takes membership.
create or replace function _caller()
returns text
language sql
stable
parallel restricted
as $$
    select coalesce(nullif(current_setting('role'), 'none'), session_user)::text
$$;
comment on function _caller() is
'The caller Instance: the role in force by SET ROLE, else the session''s own.';
create or replace function _callers_of(p_document jsonb)
returns table (caller text, is_producer boolean, is_worker boolean, is_observer boolean)
language sql
stable
as $$
    select
        c.name,
        coalesce(p_document -> 'producer_instances' ? c.name, false),
        coalesce(p_document -> 'worker_instances' ? c.name, false),
        coalesce(p_document -> 'observer_instances' ? c.name, false)
    from (
        select p.value
        from jsonb_array_elements_text(p_document -> 'producer_instances') as p
        union
        select w.value
        from jsonb_array_elements_text(p_document -> 'worker_instances') as w
        union
        select o.value
        from jsonb_array_elements_text(p_document -> 'observer_instances') as o
    ) as c (name)
$$;
comment on function _callers_of(jsonb) is
'The caller Instances that a configuration document declares, and what each may do.';
-- Anybody may write a setting, so its form is proved before any cast. Counts in the
-- pattern would cost ten times the rest of it.
create or replace function _claim_floor(p_setting text)
returns text[]
language sql
immutable
as $$
    select case
        when
            p_setting collate "C" ~ '^[0-9]+ [0-9a-f]+ [0-9]+ [0-9]+ [12]$'
            and length(split_part(p_setting, ' ', 1)) <= 16
            and length(split_part(p_setting, ' ', 2)) = 32
            and length(split_part(p_setting, ' ', 3)) <= 16
            and length(split_part(p_setting, ' ', 4)) <= 9
            then string_to_array(p_setting, ' ')
    end
$$;
comment on function _claim_floor(text) is
'What a claim left for the next one of its session: the due time of the last row it '
'handed out and its id, when the last walk from the start began and what it took, all '
'in microseconds, and 2 where the walk before was slow, too; NULL where it is anything '
'else.';
-- Bounds are the table's constraints to keep; this proves what a cast would bend into
-- them, a fraction or a number in quotes, and that the lists are lists of names.
create or replace function _document_fault(p_document jsonb, p_schema text)
returns text
language plpgsql
stable
as $$
declare
    v_field text;
begin
    if (jsonb_typeof(p_document) = 'object') is not true then
        return 'the document must be a JSON object';
    end if;
    select k.name into v_field
    from jsonb_object_keys(p_document) as k (name)
    where k.name not in (
        'schema', 'database_url_secret', 'lease_seconds', 'retry_base_seconds',
        'retry_max_seconds', 'retry_jitter', 'notify', 'retention_seconds',
        'role_prefix', 'queues', 'producer_instances', 'worker_instances',
        'observer_instances'
    );
    if found then
        return format('%I is not a field of the configuration', v_field);
    end if;
    if (p_document ->> 'schema' = p_schema) is not true then
        return format('the document''s schema is not %I', p_schema);
    end if;

    for v_field in
        select k.name
        from unnest(array[
            'lease_seconds', 'retry_base_seconds', 'retry_max_seconds',
            'retention_seconds'
        ]) as k (name)
        where
            k.name <> 'retention_seconds'
            or coalesce(p_document -> k.name, 'null') <> 'null'
    loop
        if jsonb_typeof(p_document -> v_field) is distinct from 'number'
            or (p_document -> v_field)::numeric % 1 <> 0 then
            return format('%s must be a whole number', v_field);
        end if;
    end loop;

    if jsonb_typeof(p_document -> 'retry_jitter') <> 'number' then
        return 'retry_jitter must be a number';
    end if;
    if jsonb_typeof(p_document -> 'notify') <> 'boolean' then
        return 'notify must be true or false';
    end if;

    foreach v_field in array array[
        'queues', 'producer_instances', 'worker_instances', 'observer_instances'
    ] loop
        if jsonb_typeof(p_document -> v_field) <> 'array'
            or jsonb_path_exists(
                p_document -> v_field, 'strict $[*] ? (@.type() != "string")'
            )
            or jsonb_array_length(p_document -> v_field) <> (
                select count(distinct e.value)
                from jsonb_array_elements(p_document -> v_field) as e
            ) then
            return format('%s must be a list of different names', v_field);
        end if;
        if coalesce(jsonb_array_length(p_document -> v_field), 0) = 0
            and v_field <> 'observer_instances' then
            return format('%s must name something', v_field);
        end if;
    end loop;
    return null;
end;
$$;
comment on function _document_fault(jsonb, text) is
'What is wrong with the form of a configuration document; NULL: nothing.';
create or replace function _entries_read()
returns bigint
language sql
volatile
as $$
    select pg_stat_get_xact_tuples_returned('live_job_claimable_idx'::regclass)
$$;
comment on function _entries_read() is
'How many entries of the claimable index this transaction has read so far.';
-- PL/pgSQL, so that it stays a call: inlined, it would be set up by every enqueue.
create or replace function _fault_of_names(
    p_queue text,
    p_kind text,
    p_idempotency_key text
)
returns text
language plpgsql
stable
as $$
begin
    return case
        when not _is_name(p_queue, 128)
            then 'queue must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_kind, 256)
            then 'kind must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
        when not _is_name(p_idempotency_key, 256)
            then 'idempotency_key must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -'
    end;
end;
$$;
comment on function _fault_of_names(text, text, text) is
'Which of the names that enqueue was given is malformed, and its limit; NULL: none.';
-- Ten bytes of a number can be sixteen thousand decimal places of text. Numbers of 64
-- characters and more are counted up to where their text alone would be too much, each
-- written out by itself, so that neither memory nor time is theirs to choose.
create or replace function _has_too_many_digits(p_payload jsonb)
returns boolean
language plpgsql
immutable
as $$
begin
    return 4096 = (
        select count(*)
        from (
            select
            from jsonb_path_query(
                p_payload, 'strict $.** ? (@.type() == "number")'
            ) as n
            where length(n::text) >= 64
            limit 4096
        ) as long
    );
end;
$$;
comment on function _has_too_many_digits(jsonb) is
'Whether the long numbers of a payload are more than 262144 bytes as text.';
-- The form is proved before the cast, so that the cast can neither raise nor depend
-- on DateStyle or TimeZone: the letters go, because a session's own zone may be called
-- T or Z. No backslash: a caller may change what it means in a literal.
create or replace function _instant_from_rfc3339(p_text text)
returns timestamptz
language sql
stable
as $$
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
comment on function _instant_from_rfc3339(text) is
'An RFC 3339 timestamp with its offset as an instant; NULL where it is none.';
-- A NOTIFY makes the commit take a lock across the whole server, so one is sent only
-- while somebody waits: a waiter holds the queue's key shared, and where nobody does
-- this session gets it for a moment. Two producers that ask at once may each find the
-- other; that costs one notification.
create or replace function _is_awaited(p_queue text)
returns boolean
language sql
volatile
as $$
    select case
        when pg_try_advisory_lock(_advisory_key(p_queue))
            then not pg_advisory_unlock(_advisory_key(p_queue))
        else true
    end
$$;
comment on function _is_awaited(text) is
'Whether a session holds the advisory lock of a queue, as a waiting worker does.';
create or replace function _is_batch(p_dimensions integer[], p_lengths integer[])
returns boolean
language sql
stable
as $$
    select (
        1 = all (p_dimensions)
        and p_lengths[1] = all (p_lengths)
        and p_lengths[1] between 1 and 1000
    ) is true
$$;
comment on function _is_batch(integer[], integer[]) is
'Whether arrays of these dimensions and lengths are parallel lists of 1 to 1000 items.';
-- Texts are compared by their bytes whatever collation a caller's columns give them:
-- one that is not deterministic knows no patterns, two that differ no comparison.
create or replace function _is_name(p_text text, p_length integer)
returns boolean
language sql
stable
as $$
    select (
        length(p_text) <= p_length
        and p_text collate "C" ~ '^[A-Za-z0-9._:/-]+$'
    ) is true
$$;
comment on function _is_name(text, integer) is
'Whether the text is 1 to p_length characters of A-Z a-z 0-9 . _ : / - alone.';
-- Most jobs are small, and the length of all their text together then proves every
-- limit there is: of each name, of the payload, of its depth, and of every number.
-- What does not pass here is not refused yet; _job_fault says.
create or replace function _is_plainly_sound(
    p_kind text,
    p_payload jsonb,
    p_idempotency_key text,
    p_available_at timestamptz,
    p_max_attempts integer
)
returns boolean
language sql
stable
as $$
    select
        p_available_at is null
        and p_max_attempts between 1 and 100
        and jsonb_typeof(p_payload) = 'object'
        and pg_column_size(p_payload || '{}') <= 256
        and length(concat(p_kind, p_idempotency_key, p_payload)) <= 256
        and (p_kind || ' ' || p_idempotency_key) collate "C"
        ~ '^[A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+$'
$$;
comment on function _is_plainly_sound(text, jsonb, text, timestamptz, integer) is
'Whether a small job to run at once is within every limit; its queue is not looked at.';
-- The names are proved together, and told apart only when one is wrong. The payload is
-- looked at in an order that keeps hostile documents cheap: its size once detoasted
-- (what the concatenation is for; JSON is never stored in eight times its text), then
-- depth, which bounds the walk, then the size and the digits of every number; and only
-- then is text made of it.
create or replace function _job_fault(
    p_queue text,
    p_kind text,
    p_payload jsonb,
    p_idempotency_key text,
    p_available_at timestamptz,
    p_max_attempts integer
)
returns text
language sql
stable
as $$
    select case
        when (
            length(p_queue) <= 128
            and length(p_kind) <= 256
            and length(p_idempotency_key) <= 256
            and (p_queue || ' ' || p_kind || ' ' || p_idempotency_key) collate "C"
            ~ '^[A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+ [A-Za-z0-9._:/-]+$'
        ) is not true
            then _fault_of_names(p_queue, p_kind, p_idempotency_key)
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
            then 'payload must be at most 262144 bytes as text'
        when jsonb_path_match(
            p_payload,
            'strict exists($.**{129}) || exists(
                $.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))
            )'
        )
            then 'payload must be nested at most 128 levels deep, and hold no number '
                 'beyond 1e308'
        when pg_column_size(p_payload || '{}') > 8192
            and _has_too_many_digits(p_payload)
            then 'payload must be at most 262144 bytes as text'
        when octet_length(p_payload::text) > 262144
            then 'payload must be at most 262144 bytes as text'
    end
$$;
comment on function _job_fault(text, text, jsonb, text, timestamptz, integer) is
'What is wrong with the arguments of enqueue, by argument and limit; NULL: nothing.';
-- A CASE decides before each cast, so that no item can raise and spoil its neighbours.
-- The planner inlines this into the statement that reads it.
create or replace function _jobs_from(p_jobs jsonb)
returns table (
    "position" integer,
    queue text,
    kind text,
    payload jsonb,
    idempotency_key text,
    available_at timestamptz,
    max_attempts integer,
    is_valid boolean
)
language sql
stable
rows 1000
as $$
    select
        f.position, f.queue, f.kind, f.payload, f.idempotency_key,
        f.available_at, f.max_attempts,
        f.is_known
        and (f.available_at is not null or f.is_at_once)
        and (
            _is_name(f.queue, 128)
            and _is_plainly_sound(
                f.kind, f.payload, f.idempotency_key, f.available_at, f.max_attempts
            ) is true
            or _job_fault(
                f.queue, f.kind, f.payload, f.idempotency_key,
                f.available_at, f.max_attempts
            ) is null
        )
    from (
        select
            i.ordinality::integer as position,
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
                then _instant_from_rfc3339(i.value ->> 'available_at')
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
comment on function _jobs_from(jsonb) is
'The items of enqueue_many in input order, typed strictly, and whether each is valid.';
-- Runs under the planner settings of claim, which alone calls it.
--
-- The claim floor. What lies in the index before the last row handed out is running or
-- dead, by the ten thousand while a snapshot is held elsewhere. After a slow walk from
-- the start the session remembers in a setting where it was. That may delay what lies
-- below until the next walk, due after 50 times as long as the last one took; after a
-- second slow one, for which what had died since should be out of the way, after a
-- second at least; and within 30 seconds whatever the setting says.
create or replace function _lease_due(
    p_queue text,
    p_limit integer,
    p_caller text,
    p_lease interval,
    p_secret bytea,
    p_floor text
)
returns setof leased_job
language plpgsql
volatile
as $$
declare
    v_setting text        := current_setting(p_floor, true);
    v_hint    text[]      := _claim_floor(v_setting);
    v_full_us bigint      := v_hint[3]::bigint;
    v_took_us bigint      := least(v_hint[4]::bigint, 600000);
    v_now     timestamptz := clock_timestamp();
    v_us      bigint      := (date_part('epoch', v_now) * 1000000)::bigint;
    v_slow    integer     := v_hint[5]::integer;
    v_is_slow boolean     := false;
    v_read    bigint      := _entries_read();
    v_from_at timestamptz := timestamptz '-infinity';
    v_from_id uuid        := uuid '00000000-0000-0000-0000-000000000000';
    v_rows    tid[];
    v_due     uuid[];
    v_due_at  timestamptz;
    v_lapsed  bigint;
    v_wanted  integer     := p_limit;
    v_leased  integer;
    v_retire  integer     := 64;
begin
    if
        v_us - v_full_us
        between 0 and greatest(50 * v_took_us, (v_slow - 1) * 1000000) - 1
    then
        v_is_slow := true;
        v_from_at := timestamptz 'epoch' + v_hint[1]::bigint * interval '1 microsecond';
        v_from_id := v_hint[2]::uuid;
    end if;

    loop
        -- The rows are locked before anything is written, and no more than are wanted:
        -- an update that joins its own candidates may, under some plans, take them all.
        select
            array_agg(d.ctid), array_agg(d.job_id), max(d.available_at),
            count(d.lease_owner)
        into v_rows, v_due, v_due_at, v_lapsed
        from (
            select l.ctid, l.job_id, l.available_at, l.lease_owner
            from live_job as l
            where
                l.queue = p_queue
                and l.available_at <= v_now
                and (l.available_at, l.job_id) > (v_from_at, v_from_id)
                and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
                and (l.attempt < l.max_attempts or v_retire > 0)
            order by l.available_at, l.job_id
            limit v_wanted
            for update skip locked
        ) as d;
        if v_from_at = '-infinity' then
            v_full_us := v_us;
            v_slow := case when v_is_slow then v_slow when v_slow = 1 then 2 else 1 end;
            v_took_us
            := (date_part('epoch', clock_timestamp() - v_now) * 1000000)::bigint;
            v_is_slow
            := _entries_read() - v_read - coalesce(cardinality(v_due), 0) > 100;
        end if;
        if v_due is null then
            exit when v_from_at = '-infinity' or v_leased is not null;
            exit when v_took_us >= 2000 and v_us - v_full_us < 50 * v_took_us;
            v_from_at := timestamptz '-infinity';
            v_now := clock_timestamp();
            v_read := _entries_read();
            continue;
        end if;
        v_from_at := v_due_at;
        v_from_id := v_due[cardinality(v_due)];
        if v_lapsed > 0 then
            v_retire := v_retire - _reclaim(v_due, v_retire);
        end if;

        -- No column of an index changes: the new version stays in its page and the
        -- index is left alone. The rows are ours, so they are where they were; found by
        -- place, and each job by its key behind a fence, they leave the planner nothing
        -- to choose, whatever it believed of the tables when it planned this.
        v_now := clock_timestamp();
        return query
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = v_now,
                lease_expires_at = v_now + p_lease,
                lease_owner = p_caller,
                lease_token_hash
                = sha256(convert_to(_lease_token(p_secret, l.job_id), 'UTF8'))
            where l.ctid = any (v_rows) and l.attempt < l.max_attempts
            returning l.*
        )
        select
            l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, _lease_token(p_secret, l.job_id),
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j
        order by l.available_at, l.job_id;
        get diagnostics v_leased = row_count;

        -- Rows that could not be leased were retired or passed over: look behind them.
        exit when v_leased = cardinality(v_due) or cardinality(v_due) < v_wanted;
        v_wanted := v_wanted - v_leased;
    end loop;

    -- Where nothing was found the floor follows a second behind, for what was enqueued
    -- before now and commits later. A rollback puts the setting back, too.
    if v_is_slow then
        if v_due is null then
            v_from_at := greatest(v_from_at, v_now - interval '1 second');
        end if;
        v_setting := set_config(
            p_floor,
            concat_ws(
                ' ', (date_part('epoch', v_from_at) * 1000000)::bigint,
                encode(uuid_send(v_from_id), 'hex'), v_full_us, v_took_us,
                v_slow
            ),
            false
        );
    elsif v_setting <> '' then
        v_setting := set_config(p_floor, '', false);
    end if;
end;
$$;
comment on function _lease_due(text, integer, text, interval, bytea, text) is
'Leases up to p_limit due jobs for claim, reclaims lapsed leases among them, and keeps '
'the claim floor of the session.';
-- Two random UUIDs hold 244 random bits. One secret serves the jobs of one claim: no
-- token tells anything of it, or of another.
create or replace function _lease_token(p_secret bytea, p_job_id uuid)
returns text
language sql
immutable
as $$
    select 'job_lease_' || encode(sha256(p_secret || uuid_send(p_job_id)), 'hex')
$$;
comment on function _lease_token(bytea, uuid) is
'The lease token of a job under the secret that its claim has drawn.';
-- 48 bits of milliseconds, the version, 12 bits of the rest of the millisecond, and
-- the variant and random half of a version 4 UUID.
create or replace function _new_job_id(p_at timestamptz)
returns uuid
language sql
volatile
as $$
    select encode(
        int8send(
            (((date_part('epoch', p_at) * 1000000)::bigint / 1000) << 16)
            | (7 << 12)
            | ((date_part('epoch', p_at) * 1000000)::bigint % 1000 * 4096 / 1000)
        )
        || substr(uuid_send(gen_random_uuid()), 9),
        'hex'
    )::uuid
$$;
comment on function _new_job_id(timestamptz) is
'A UUID version 7 of the given instant: ids sort by it down to a microsecond.';
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
-- The caller holds the rows. A row of evidence that is there already, by whatever
-- accident, must not keep a queue from going on.
create or replace function _reclaim(p_job_ids uuid[], p_limit integer)
returns integer
language sql
volatile
as $$
    with lapsed as materialized (
        select l.ctid, l.*, clock_timestamp() as ended_at
        from live_job as l
        where
            l.job_id = any (p_job_ids)
            and num_nulls(l.leased_at, l.lease_owner, l.lease_token_hash) = 0
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
        insert into attempt (
            job_id, leased_at, ended_at, attempt, max_attempts,
            worker, outcome, failure_code, lease_token_hash
        )
        select
            e.job_id, e.leased_at, e.ended_at, e.attempt, e.max_attempts,
            e.lease_owner, 'lease_expired',
            case when e.attempt >= e.max_attempts then 'attempts_exhausted' end,
            e.lease_token_hash
        from lapsed as e
        where
            e.attempt < e.max_attempts
            or e.job_id in (select d.job_id from ended as d)
        on conflict (job_id, attempt) do nothing
    )
    select count(*)::integer from ended
$$;
comment on function _reclaim(uuid[], integer) is
'Records the lapsed lease of each of these jobs, and ends up to p_limit of those that '
'had no attempt left; answers how many ended.';
create or replace function _require_producer()
returns void
language plpgsql
stable
as $$
begin
    if not exists (
        select from instance as i where _caller() = any (i.producers)
    ) then
        raise exception using
            errcode = '42501',
            message = format('role %I is not a declared producer', _caller()),
            hint    = 'SET ROLE to a role that producer_instances names.';
    end if;
end;
$$;
comment on function _require_producer() is
'Refuses whoever is not a declared producer (42501).';
create or replace function _require_queue(p_queue text)
returns void
language plpgsql
stable
as $$
begin
    if not exists (select from queue as q where q.queue = p_queue collate "C") then
        raise exception using
            errcode = 'LJ003',
            message = 'queue is not declared',
            hint    = 'Name a queue that the configuration declares.';
    end if;
end;
$$;
comment on function _require_queue(text) is
'Refuses a queue that is not declared (LJ003).';
-- The exponent is clamped where base * 2^17 is above every permitted maximum, so the
-- product can neither overflow nor lose its bound.
create or replace function _retry_at(
    p_failed_at timestamptz,
    p_attempt integer,
    p_base_seconds integer,
    p_max_seconds integer,
    p_jitter double precision
)
returns timestamptz
language sql
volatile
as $$
    select p_failed_at + make_interval(
        secs => (1 - p_jitter * random()) * least(
            p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17),
            p_max_seconds
        )
    )
$$;
comment on function _retry_at(
    timestamptz, integer, integer, integer, double precision
) is
'When a failed attempt may be repeated: after base * 2^(attempt - 1) seconds, at most '
'max, less what jitter takes off.';
-- PL/pgSQL keeps the plan; a function in SQL would be planned by every call.
create or replace function _wake(p_queue text)
returns void
language plpgsql
volatile
as $$
begin
    perform pg_notify(current_schema(), p_queue) from instance as i where i.notify;
end;
$$;
comment on function _wake(text) is
'Notifies the sessions that wait for a queue, on the channel named as the schema.';
create or replace function claim(p_queue text, p_limit integer default 1)
returns setof leased_job
language plpgsql
security definer
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
    v_caller   text        collate "C";
    v_lease    interval;
    v_is_known boolean;
    v_floor    text;
    v_now      timestamptz := clock_timestamp();
    v_read     bigint      := _entries_read();
    v_secret   bytea
    := uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid());
begin
    select
        _caller(), make_interval(secs => i.lease_seconds),
        p_queue collate "C" = any (i.queues),
        'lenso_jobs.floor_' || to_hex(_advisory_key(p_queue))
    into v_caller, v_lease, v_is_known, v_floor
    from instance as i
    where _caller() = any (i.workers);
    if not found then
        raise exception using
            errcode = '42501',
            message = format('role %I is not a declared worker', _caller()),
            hint    = 'SET ROLE to a role that worker_instances names.';
    end if;
    if v_is_known is not true then
        perform _require_queue(p_queue);
    end if;
    if (p_limit between 1 and 1000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 1000';
    end if;

    -- One job, and nothing in the way: one statement, an eighth of a whole claim
    -- cheaper. A job with a lapsed lease, or changed since the snapshot, is not for it.
    if p_limit = 1 and coalesce(current_setting(v_floor, true), '') = '' then
        return query
        with leased as (
            update live_job as l
            set
                attempt = l.attempt + 1,
                leased_at = v_now,
                lease_expires_at = v_now + v_lease,
                lease_owner = v_caller,
                lease_token_hash
                = sha256(convert_to(_lease_token(v_secret, l.job_id), 'UTF8'))
            where
                l.ctid = (
                    select d.ctid
                    from live_job as d
                    where
                        d.queue = p_queue collate "C"
                        and d.available_at <= v_now
                        and (d.lease_expires_at is null or d.lease_expires_at <= v_now)
                    order by d.available_at, d.job_id
                    limit 1
                    for update skip locked
                )
                and l.lease_owner is null
                and l.attempt < l.max_attempts
            returning l.*
        )
        select
            l.job_id, l.queue::text, j.kind::text, j.payload::jsonb,
            l.attempt, l.max_attempts, _lease_token(v_secret, l.job_id),
            l.lease_expires_at::timestamptz, j.created_at::timestamptz
        from leased as l
        cross join lateral (
            select i.* from job as i where i.job_id = l.job_id offset 0
        ) as j;
        if found then
            if _entries_read() - v_read > 101 then
                perform set_config(v_floor, '0 ' || repeat('0', 32) || ' 0 0 1', false);
            end if;
            return;
        end if;
    end if;

    return query
    select d.*
    from _lease_due(
        p_queue collate "C", p_limit, v_caller, v_lease, v_secret, v_floor
    ) as d;
end;
$$;
comment on function claim(text, integer) is
'Leases up to p_limit due jobs of a queue, oldest due first, each with its attempt '
'(the fencing token) and a fresh lease token; no row where none is due. Reclaims '
'lapsed leases and ends up to 64 jobs whose last one lapsed. Refuses an undeclared '
'caller (42501), an undeclared queue (LJ003), a limit outside 1 to 1000 (LJ007).';
create or replace function complete(p_job_id uuid, p_lease_token text)
returns boolean
language plpgsql
security definer
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
        where
            l.job_id = p_job_id
            and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        returning l.*
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        worker, outcome, lease_token_hash
    )
    select
        e.job_id, e.leased_at, clock_timestamp(), e.attempt, e.max_attempts,
        e.lease_owner, 'succeeded', e.lease_token_hash
    from ended as e
    where e.lease_expires_at > clock_timestamp();
    if found then
        return true;
    end if;

    -- The first answer may have been lost on its way. Read by job before it is judged:
    -- the outcome in the inner query would let the index of ends be walked.
    perform
    from (
        select e.* from attempt as e where e.job_id = p_job_id offset 0
    ) as a
    where
        a.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
        and a.worker = _caller()
        and a.outcome = 'succeeded';
    if not found then
        raise exception using
            errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;
    return true;
end;
$$;
comment on function complete(uuid, text) is
'Ends a job as succeeded, in the caller''s transaction; repeated under the same lease '
'it answers true once more. Refuses a lease that is not live and the caller''s own '
'(LJ004).';
create or replace function complete_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof completed_item
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_tidscan = on
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
as $$
declare
    v_caller text collate "C" := _caller();
    v_rows   tid[];
    v_ended  integer;
begin
    if not _is_batch(
        array[array_ndims(p_job_ids), array_ndims(p_lease_tokens)],
        array[cardinality(p_job_ids), cardinality(p_lease_tokens)]
    ) then
        raise exception using
            errcode = 'LJ007',
            message = 'job_ids and lease_tokens must be parallel lists of 1 to 1000 '
                      'items';
    end if;

    -- Rows are locked in the order of their ids, as everywhere, and each lease is
    -- judged by what the lock returned: without the fence it would be judged before.
    select array_agg(m.ctid) into v_rows
    from (
        select i.job_id, sha256(convert_to(i.lease_token, 'UTF8')) as lease_token_hash
        from unnest(p_job_ids, p_lease_tokens) as i (job_id, lease_token)
        order by i.job_id
    ) as i
    cross join lateral (
        select l.ctid, l.lease_expires_at
        from live_job as l
        where
            l.job_id = i.job_id
            and l.lease_token_hash = i.lease_token_hash
            and l.lease_owner = v_caller
        offset 0
        for update
    ) as m
    where m.lease_expires_at > clock_timestamp();

    with ended as (
        delete from live_job as l
        where l.ctid = any (v_rows)
        returning l.*
    )
    insert into attempt (
        job_id, leased_at, ended_at, attempt, max_attempts,
        worker, outcome, lease_token_hash
    )
    select
        e.job_id, e.leased_at, clock_timestamp(), e.attempt, e.max_attempts,
        e.lease_owner, 'succeeded', e.lease_token_hash
    from ended as e;
    get diagnostics v_ended = row_count;
    if v_ended = cardinality(p_job_ids) then
        return query
        select i.ordinality::integer, i.job_id, 'completed'
        from unnest(p_job_ids) with ordinality as i (job_id);
        return;
    end if;

    -- The evidence tells an item whose first answer was lost, or that was given twice,
    -- from one whose lease is gone. It is read by job before it is judged: the outcome
    -- in the inner query would let the index of ends be walked from end to end.
    return query
    select
        i.ordinality::integer,
        i.job_id,
        case when a.job_id is null then 'invalid_lease' else 'completed' end
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral (
        select e.*
        from attempt as e
        where e.job_id = i.job_id
        order by e.attempt
        offset 0
    ) as a
        on
            a.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and a.worker = v_caller
            and a.outcome = 'succeeded'
    order by i.ordinality;
end;
$$;
comment on function complete_many(uuid[], text[]) is
'Completes many jobs at once and answers one row an item in input order: completed or '
'invalid_lease. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
create or replace function enqueue(
    p_queue text,
    p_kind text,
    p_payload jsonb,
    p_idempotency_key text,
    p_available_at timestamptz default null,
    p_max_attempts integer default 3
)
returns enqueued_job
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
as $$
declare
    v_caller  text collate "C" := _caller();
    v_now     timestamptz := clock_timestamp();
    v_fault   text;
    v_answer  enqueued_job;
    v_is_same boolean;
begin
    if _is_plainly_sound(
        p_kind, p_payload, p_idempotency_key, p_available_at, p_max_attempts
    ) is not true then
        perform _require_producer();
        v_fault := _job_fault(
            p_queue, p_kind, p_payload,
            p_idempotency_key, p_available_at, p_max_attempts
        );
    end if;

    loop
        -- The insert itself proves caller and queue: nearly every call needs to ask no
        -- more. What refused it is found out only afterwards.
        if v_fault is null then
            insert into job (
                job_id, created_at, available_at, max_attempts,
                producer, queue, kind, idempotency_key, payload
            )
            select
                _new_job_id(v_now), v_now, p_available_at, p_max_attempts,
                v_caller, p_queue, p_kind, p_idempotency_key, p_payload
            from instance as i
            where
                v_caller = any (i.producers)
                and p_queue collate "C" = any (i.queues)
            on conflict (producer, idempotency_key) do nothing
            returning job_id, true into v_answer;
        end if;
        if v_answer.created then
            insert into live_job (job_id, available_at, attempt, max_attempts, queue)
            values (
                v_answer.job_id, greatest(p_available_at, v_now), 0, p_max_attempts,
                p_queue
            );
            if _is_awaited(p_queue) then
                perform _wake(p_queue);
            end if;
            return v_answer;
        end if;

        perform _require_producer();
        if not exists (
            select from instance as i where p_queue collate "C" = any (i.queues)
        ) then
            v_fault := coalesce(
                v_fault,
                _job_fault(
                    p_queue, p_kind, p_payload,
                    p_idempotency_key, p_available_at, p_max_attempts
                ),
                format('queue %s is not declared', p_queue)
            );
        end if;
        if v_fault is not null then
            raise exception using errcode = 'LJ001', message = v_fault;
        end if;

        -- The insert may have waited for a commit that its snapshot does not show; this
        -- one does. A purge may take the row in between: then once more. To an old
        -- snapshot a purged row may show beside this transaction's own, the newest.
        -- Behind the fence only the key's own index serves.
        select
            j.job_id,
            (j.queue, j.kind, j.payload, j.max_attempts)
            = (
                p_queue collate "C", p_kind collate "C", p_payload, p_max_attempts
            )
            and j.available_at is not distinct from p_available_at
        into v_answer.job_id, v_is_same
        from (
            select i.*
            from job as i
            where
                i.producer = v_caller
                and i.idempotency_key = p_idempotency_key collate "C"
            offset 0
        ) as j
        order by j.job_id desc
        limit 1;
        exit when found;
    end loop;

    if not v_is_same then
        raise exception using
            errcode = 'LJ002',
            message = 'idempotency_key was used for another intent',
            hint    = 'Repeat the first intent unchanged, or choose a new key.';
    end if;
    v_answer.created := false;
    return v_answer;
end;
$$;
comment on function enqueue(text, text, jsonb, text, timestamptz, integer) is
'Makes a job durable and says whether this call created it: the same key with the same '
'intent answers with the first job. Refuses an undeclared caller (42501), an argument '
'out of bounds or an undeclared queue (LJ001), a key used for another intent (LJ002).';
create or replace function enqueue_many(p_jobs jsonb)
returns setof enqueued_item
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
as $$
declare
    v_caller text        := _caller();
    v_queues text[];
    v_now    timestamptz := clock_timestamp();
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
    if jsonb_array_length(p_jobs) not between 1 and 1000 then
        raise exception using
            errcode = 'LJ007',
            message = 'jobs must be 1 to 1000 items';
    end if;

    -- An item's id tells its position, and its instant is one microsecond after its
    -- predecessor's: input order is order of enqueueing.
    v_ids := array(
        select _new_job_id(v_now + make_interval(secs => n * 1e-6))
        from generate_series(1, jsonb_array_length(p_jobs)) as n
    );
    loop
        -- Keys go in sorted, so that no two batches wait for each other.
        with fresh as (
            insert into job (
                job_id, created_at, available_at, max_attempts,
                producer, queue, kind, idempotency_key, payload
            )
            select
                v_ids[i.position], v_now + make_interval(secs => i.position * 1e-6),
                i.available_at, i.max_attempts,
                v_caller, i.queue, i.kind, i.idempotency_key, i.payload
            from (
                select distinct on (f.idempotency_key collate "C") f.*
                from _jobs_from(p_jobs) as f
                where f.is_valid and f.queue = any (v_queues)
                order by f.idempotency_key collate "C", f.position
            ) as i
            on conflict (producer, idempotency_key) do nothing
            returning job_id, available_at, created_at, max_attempts, queue
        ),
        live as (
            insert into live_job (job_id, available_at, attempt, max_attempts, queue)
            select
                f.job_id, greatest(f.available_at, f.created_at), 0, f.max_attempts,
                f.queue
            from fresh as f
            returning queue
        )
        select count(*)::integer, array_agg(distinct l.queue)
        into v_count, v_filled
        from live as l;
        perform _wake(q.queue)
        from unnest(v_filled) as q (queue)
        where _is_awaited(q.queue);
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
                case when r.outcome in ('created', 'existing') then r.job_id end,
                r.outcome
            )::enqueued_item
            order by i.position
        )
        into v_items
        from (
            select f.*, f.is_valid and f.queue = any (v_queues) as ok
            from _jobs_from(p_jobs) as f
            offset 0
        ) as i
        left join lateral (
            select n.*
            from (
                select k.*
                from job as k
                where
                    i.ok
                    and k.producer = v_caller
                    and k.idempotency_key = i.idempotency_key
                offset 0
            ) as n
            order by n.job_id desc
            limit 1
        ) as j on true
        cross join lateral (
            select
                j.job_id,
                case
                    when not i.ok then 'invalid_job'
                    when j.job_id = v_ids[i.position] then 'created'
                    when
                        (j.queue, j.kind, j.payload, j.max_attempts)
                        = (i.queue, i.kind, i.payload, i.max_attempts)
                        and j.available_at is not distinct from i.available_at
                        then 'existing'
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
'answers one row an item in input order; a bad item spoils no other. Refuses an '
'undeclared caller (42501), what is no array (LJ001), and other than 1 to 1000 items '
'(LJ007).';
create or replace function fail(
    p_job_id uuid,
    p_lease_token text,
    p_failure_code text,
    p_retryable boolean
)
returns failed_job
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_hash     bytea := sha256(convert_to(p_lease_token, 'UTF8'));
    v_job      live_job;
    v_now      timestamptz;
    v_retry_at timestamptz;
    v_answer   failed_job;
begin
    if not _is_name(p_failure_code, 128) then
        raise exception using
            errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of '
                      'A-Z a-z 0-9 . _ : / -';
    end if;
    if p_retryable is null then
        raise exception using errcode = 'LJ005', message = 'retryable must not be NULL';
    end if;

    select l.* into v_job
    from live_job as l
    where
        l.job_id = p_job_id
        and l.lease_token_hash = v_hash
        and l.lease_owner = _caller()
    for update;

    if not found then
        -- The first answer may have been lost on its way.
        select case a.outcome when 'retried' then 'queued' else 'failed' end,
            a.retry_at::timestamptz
        into v_answer
        from attempt as a
        where
            a.job_id = p_job_id
            and a.lease_token_hash = v_hash
            and a.worker = _caller()
            and a.failure_code = p_failure_code collate "C"
            and a.retryable = p_retryable;
        if found then
            return v_answer;
        end if;
    end if;

    -- The lock may have been waited for, so the clock is read behind it.
    v_now := clock_timestamp();
    if (v_job.lease_expires_at > v_now) is not true then
        raise exception using
            errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: discard the '
                      'result.';
    end if;

    if p_retryable and v_job.attempt < v_job.max_attempts then
        update live_job as l
        set
            available_at = _retry_at(
                v_now, v_job.attempt,
                i.retry_base_seconds, i.retry_max_seconds, i.retry_jitter
            ),
            leased_at = null,
            lease_expires_at = null,
            lease_owner = null,
            lease_token_hash = null,
            last_failure_code = p_failure_code
        from instance as i
        where l.job_id = p_job_id
        returning l.available_at::timestamptz into v_retry_at;
        if _is_awaited(v_job.queue) then
            perform _wake(v_job.queue);
        end if;
    else
        delete from live_job as l where l.job_id = p_job_id;
    end if;

    insert into attempt (
        job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
        retryable, worker, outcome, failure_code, lease_token_hash
    )
    values (
        p_job_id, v_job.leased_at, v_now, v_retry_at, v_job.attempt, v_job.max_attempts,
        p_retryable, v_job.lease_owner,
        case when v_retry_at is null then 'failed' else 'retried' end,
        p_failure_code, v_hash
    );
    return (case when v_retry_at is null then 'failed' else 'queued' end, v_retry_at);
end;
$$;
comment on function fail(uuid, text, text, boolean) is
'Records a failed attempt: queued again with the time the job falls due, or failed for '
'good where it is not retryable or no attempt is left; repeated under the same lease '
'it answers the same. Refuses a malformed code or mark (LJ005), and a lease that is '
'not live and the caller''s own (LJ004).';
create or replace function fail_many(
    p_job_ids uuid[],
    p_lease_tokens text[],
    p_failure_codes text[],
    p_retryable boolean[]
)
returns setof failed_item
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_tidscan = on
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
as $$
declare
    v_caller    text collate "C" := _caller();
    v_rows      tid[];
    v_job_ids   uuid[];
    v_codes     text[];
    v_retryable boolean[];
    v_queues    text[];
begin
    if not _is_batch(
        array[
            array_ndims(p_job_ids), array_ndims(p_lease_tokens),
            array_ndims(p_failure_codes), array_ndims(p_retryable)
        ],
        array[
            cardinality(p_job_ids), cardinality(p_lease_tokens),
            cardinality(p_failure_codes), cardinality(p_retryable)
        ]
    ) then
        raise exception using
            errcode = 'LJ007',
            message = 'job_ids, lease_tokens, failure_codes and retryable must be '
                      'parallel lists of 1 to 1000 items';
    end if;

    -- Locked and judged as in complete_many; of an item given twice the first counts.
    select
        array_agg(m.ctid), array_agg(m.job_id),
        array_agg(m.failure_code), array_agg(m.retryable)
    into v_rows, v_job_ids, v_codes, v_retryable
    from (
        select distinct on (h.job_id) h.*
        from (
            select l.ctid, l.lease_expires_at, i.*
            from (
                select u.*
                from unnest(p_job_ids, p_lease_tokens, p_failure_codes, p_retryable)
                with ordinality as u (job_id, lease_token, failure_code, retryable)
                where _is_name(u.failure_code, 128) and u.retryable is not null
                order by u.job_id, u.ordinality
            ) as i
            cross join lateral (
                select l.ctid, l.lease_expires_at
                from live_job as l
                where
                    l.job_id = i.job_id
                    and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
                    and l.lease_owner = v_caller
                offset 0
                for update
            ) as l
        ) as h
        where h.lease_expires_at > clock_timestamp()
        order by h.job_id, h.ordinality
    ) as m;

    -- A retry moves its row in every index, so it is taken out and put back: rows found
    -- by their place leave the planner no join to choose.
    with taken as (
        delete from live_job as l
        where l.ctid = any (v_rows)
        returning l.*, clock_timestamp() as ended_at
    ),
    decided as materialized (
        select
            t.*, i.failure_code, i.retryable,
            case when i.retryable and t.attempt < t.max_attempts
                then _retry_at(
                    t.ended_at, t.attempt,
                    n.retry_base_seconds, n.retry_max_seconds, n.retry_jitter
                )
            end as retry_at
        from instance as n
        cross join taken as t
        cross join lateral (
            select v_codes[p.n] as failure_code, v_retryable[p.n] as retryable
            from array_position(v_job_ids, t.job_id) as p (n)
        ) as i
    ),
    requeued as (
        insert into live_job (
            job_id, available_at, attempt, max_attempts, queue, last_failure_code
        )
        select
            d.job_id, d.retry_at, d.attempt, d.max_attempts, d.queue, d.failure_code
        from decided as d
        where d.retry_at is not null
        returning queue
    ),
    evidence as (
        insert into attempt (
            job_id, leased_at, ended_at, retry_at, attempt, max_attempts,
            retryable, worker, outcome, failure_code, lease_token_hash
        )
        select
            d.job_id, d.leased_at, d.ended_at, d.retry_at, d.attempt, d.max_attempts,
            d.retryable, d.lease_owner,
            case when d.retry_at is null then 'failed' else 'retried' end,
            d.failure_code, d.lease_token_hash
        from decided as d
    )
    select array_agg(distinct r.queue) into v_queues from requeued as r;
    perform _wake(q.queue)
    from unnest(v_queues) as q (queue)
    where _is_awaited(q.queue);

    return query
    select
        i.ordinality::integer,
        i.job_id,
        case
            when not _is_name(i.failure_code, 128) or i.retryable is null
                then 'invalid_failure'
            when a.job_id is null then 'invalid_lease'
            when a.outcome = 'retried' then 'queued'
            else 'failed'
        end,
        a.retry_at::timestamptz
    from unnest(p_job_ids, p_lease_tokens, p_failure_codes, p_retryable)
    with ordinality as i (job_id, lease_token, failure_code, retryable)
    left join lateral (
        select e.*
        from attempt as e
        where e.job_id = i.job_id
        order by e.attempt
        offset 0
    ) as a
        on
            a.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and a.worker = v_caller
            and a.failure_code = i.failure_code collate "C"
            and a.retryable = i.retryable
    order by i.ordinality;
end;
$$;
comment on function fail_many(uuid[], text[], text[], boolean[]) is
'Fails many attempts at once and answers one row an item in input order: queued with '
'the time it falls due, failed, invalid_lease or invalid_failure. Refuses other than '
'four parallel lists of 1 to 1000 items (LJ007).';
create or replace function next_available_at(p_queue text)
returns timestamptz
language plpgsql
stable
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_now     timestamptz := clock_timestamp();
    v_queued  timestamptz;
    v_lapsing timestamptz;
begin
    perform _require_queue(p_queue);

    select l.available_at::timestamptz into v_queued
    from live_job as l
    where l.queue = p_queue collate "C" and l.lease_expires_at is null
    order by l.available_at, l.job_id
    limit 1;
    if v_queued <= v_now then
        return v_queued;
    end if;

    -- Nothing is due, so whatever lies before now is running, and only that is read.
    select min(l.lease_expires_at)::timestamptz into v_lapsing
    from live_job as l
    where l.queue = p_queue collate "C" and l.available_at <= v_now;
    return least(v_queued, v_lapsing);
end;
$$;
comment on function next_available_at(text) is
'When the next job of a queue falls due, lapsing leases included; NULL while it is '
'empty. For a worker''s sleep: dear while thousands run. Refuses an undeclared queue '
'(LJ003).';
create or replace function renew(p_job_id uuid, p_lease_token text)
returns timestamptz
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_indexscan = on
set enable_bitmapscan = off
as $$
declare
    v_expires_at timestamptz;
    v_lease      interval;
    v_now        timestamptz;
begin
    -- Only the caller's own lease is locked: a made-up token holds up nobody.
    select l.lease_expires_at::timestamptz, make_interval(secs => i.lease_seconds)
    into v_expires_at, v_lease
    from live_job as l
    cross join instance as i
    where
        l.job_id = p_job_id
        and l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))
        and l.lease_owner = _caller()
    for update of l;

    -- The lock may have been waited for, so the clock is read behind it.
    v_now := clock_timestamp();
    if (v_expires_at > v_now) is not true then
        raise exception using
            errcode = 'LJ004',
            message = 'the job is not leased under the lease presented',
            hint    = 'The lease expired, was superseded or has ended: stop this work.';
    end if;

    update live_job as l
    set lease_expires_at = greatest(v_expires_at, v_now + v_lease)
    where l.job_id = p_job_id
    returning l.lease_expires_at::timestamptz into v_expires_at;
    return v_expires_at;
end;
$$;
comment on function renew(uuid, text) is
'Extends a live lease by the Instance''s lease_seconds from now, never shortening it, '
'and answers its new end. Refuses a lease that is not live and the caller''s own '
'(LJ004).';
create or replace function renew_many(p_job_ids uuid[], p_lease_tokens text[])
returns setof renewed_item
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
as $$
declare
    v_mine uuid[];
    v_now  timestamptz;
begin
    if not _is_batch(
        array[array_ndims(p_job_ids), array_ndims(p_lease_tokens)],
        array[cardinality(p_job_ids), cardinality(p_lease_tokens)]
    ) then
        raise exception using
            errcode = 'LJ007',
            message = 'job_ids and lease_tokens must be parallel lists of 1 to 1000 '
                      'items';
    end if;

    -- A row that somebody holds is passed over: waiting behind this worker's own
    -- uncommitted complete would let its other leases run out. One element an item,
    -- NULL where nothing was locked.
    select array_agg(m.job_id order by i.ordinality)
    into v_mine
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral (
        select l.job_id
        from live_job as l
        where
            l.job_id = i.job_id
            and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
        for update skip locked
    ) as m on true;

    v_now := clock_timestamp();
    update live_job as l
    set lease_expires_at = greatest(
        l.lease_expires_at, v_now + make_interval(secs => n.lease_seconds)
    )
    from instance as n
    where l.job_id = any (v_mine) and l.lease_expires_at > v_now;

    return query
    select
        i.ordinality::integer,
        i.job_id,
        case when v_mine[i.ordinality] is not null
            then l.lease_expires_at::timestamptz
        end,
        case
            when l.job_id is null then 'invalid_lease'
            when v_mine[i.ordinality] is null then 'busy'
            else 'renewed'
        end
    from unnest(p_job_ids, p_lease_tokens) with ordinality as i (job_id, lease_token)
    left join lateral (
        select e.* from live_job as e where e.job_id = i.job_id offset 0
    ) as l
        on
            l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
            and l.lease_owner = _caller()
            and l.lease_expires_at > v_now
    order by i.ordinality;
end;
$$;
comment on function renew_many(uuid[], text[]) is
'Renews many leases at once and answers one row an item in input order: renewed with '
'its new end, invalid_lease, or busy where another session holds the job''s row at the '
'moment. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
create or replace function wait_key(p_queue text)
returns bigint
language plpgsql
stable
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
begin
    perform _require_queue(p_queue);
    return (select _advisory_key(p_queue) from instance as i where i.notify);
end;
$$;
comment on function wait_key(text) is
'The advisory lock that a waiting worker holds, shared and by the try form, while it '
'listens on the channel named as the schema for the queue''s name; NULL where the '
'Instance sends no notifications. Refuses an undeclared queue (LJ003).';
create or replace function inspect(p_job_id uuid)
returns inspected_job
language plpgsql
stable
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_answer inspected_job;
begin
    select
        j.job_id,
        j.queue,
        j.kind,
        case
            when l.lease_owner is not null then 'running'
            when l.job_id is not null then 'queued'
            when a.outcome = 'succeeded' then 'succeeded'
            else 'failed'
        end,
        coalesce(l.attempt, a.attempt),
        coalesce(l.max_attempts, a.max_attempts),
        coalesce(l.available_at, greatest(j.available_at, j.created_at))::timestamptz,
        l.lease_expires_at::timestamptz,
        coalesce(l.last_failure_code, f.failure_code),
        j.created_at::timestamptz,
        greatest(j.created_at, l.leased_at, a.ended_at)::timestamptz,
        j.producer,
        coalesce(l.lease_owner, a.worker),
        case when l.job_id is null then a.ended_at::timestamptz end
    into v_answer
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
    where j.job_id = p_job_id;
    if not found then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may have been purged, or belong to another Instance.';
    end if;
    return v_answer;
end;
$$;
comment on function inspect(uuid) is
'The durable evidence of one job: identity, status, attempts, lease and retry state, '
'last failure code; never its payload or key. Changes nothing. Refuses an unknown job '
'(LJ006).';
-- Runs with the rights of whoever calls it, and only the owner may.
create or replace function configure(p_document jsonb)
returns boolean
language plpgsql
set search_path from current
set lock_timeout = '5s'
as $$
declare
    v_fault   text    := _document_fault(p_document, current_schema());
    v_queues  text[];
    v_count   integer;
    v_changes integer := 0;
begin
    if v_fault is not null then
        raise exception using errcode = 'LJ007', message = v_fault;
    end if;
    -- An older snapshot would not show the jobs of a queue that is left out.
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using
            errcode = 'LJ007',
            message = 'configure needs a transaction at READ COMMITTED';
    end if;

    lock table instance in share row exclusive mode;
    insert into instance as i (
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
        configured_at = excluded.configured_at
    where
        (
            i.lease_seconds, i.retry_base_seconds, i.retry_max_seconds,
            i.retry_jitter, i.notify, i.retention_seconds
        )
        is distinct from (
            excluded.lease_seconds, excluded.retry_base_seconds,
            excluded.retry_max_seconds, excluded.retry_jitter, excluded.notify,
            excluded.retention_seconds
        );
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    v_queues := array(
        select q.value from jsonb_array_elements_text(p_document -> 'queues') as q
    );
    insert into queue (queue)
    select q.queue from unnest(v_queues) as q (queue)
    on conflict (queue) do nothing;
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    -- Whoever enqueues has read the instance's row and so holds the table until its
    -- transaction ends: behind this lock every job of the queue can be seen, but for
    -- those that a transaction with an older snapshot may still add. Every verb waits
    -- behind whoever waits for it, hence the timeout above.
    if exists (select from queue as q where q.queue <> all (v_queues)) then
        lock table instance in access exclusive mode;
        if exists (select from live_job as l where l.queue <> all (v_queues)) then
            raise exception using
                errcode = 'LJ007',
                message = 'a queue that the document leaves out still has live jobs',
                hint    = 'Declare it until its jobs have ended.';
        end if;
        delete from queue as q where q.queue <> all (v_queues);
        v_changes := v_changes + 1;
    end if;

    delete from caller as c
    where c.caller not in (select d.caller from _callers_of(p_document) as d);
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    insert into caller as c (caller, is_producer, is_worker, is_observer)
    select d.caller, d.is_producer, d.is_worker, d.is_observer
    from _callers_of(p_document) as d
    on conflict (caller) do update
    set
        is_producer = excluded.is_producer,
        is_worker = excluded.is_worker,
        is_observer = excluded.is_observer
    where
        (c.is_producer, c.is_worker, c.is_observer)
        is distinct from
        (excluded.is_producer, excluded.is_worker, excluded.is_observer);
    get diagnostics v_count = row_count;
    v_changes := v_changes + v_count;

    if v_changes > 0 then
        insert into operator_act (operator, act, arguments, job_count)
        values (_caller(), 'configure', p_document, 0);
    end if;
    return v_changes > 0;
exception when check_violation or numeric_value_out_of_range then
    raise exception using
        errcode = 'LJ007',
        message = format('a value of the document is out of range: %s', sqlerrm);
end;
$$;
comment on function configure(jsonb) is
'Stores policy, queues and callers as the configuration document has them, and answers '
'whether anything changed; audited. For the owner alone; memberships are '
'bootstrap.sql''s. Refuses unknown fields, another schema''s document, and to leave '
'out a queue that has live jobs (LJ007).';
create or replace function purge(p_before timestamptz, p_limit integer default 1000)
returns integer
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_job_ids uuid[];
    v_count   integer;
begin
    if (isfinite(p_before) and p_before <= clock_timestamp()) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'before must be a finite time that has passed';
    end if;
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;

    -- Lookups are fenced or scalar: as joins, planned while the tables were empty, they
    -- would be walks.
    v_job_ids := array(
        select j.job_id
        from (
            select e.job_id, e.attempt
            from attempt as e
            where
                e.ended_at < p_before
                and (
                    e.outcome in ('succeeded', 'failed')
                    or e.failure_code = 'attempts_exhausted'
                )
            order by e.ended_at
        ) as a
        cross join lateral (
            select i.job_id
            from job as i
            where
                i.job_id = a.job_id
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
        where
            j.job_id = any (v_job_ids)
            and (select l.job_id from live_job as l where l.job_id = j.job_id) is null
            and p_before > (
                select max(a.ended_at) from attempt as a where a.job_id = j.job_id
            )
        returning j.job_id
    )
    select array_agg(g.job_id), count(*)::integer into v_job_ids, v_count
    from gone as g;
    delete from attempt as a where a.job_id = any (v_job_ids);

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'purge',
        jsonb_build_object('before', p_before, 'limit', p_limit), v_count
    );
    return v_count;
end;
$$;
comment on function purge(timestamptz, integer) is
'Deletes up to p_limit jobs that ended before the given time, oldest end first, with '
'their evidence and keys, and answers how many; audited. Call it until it answers 0. '
'Refuses a cut-off that is NULL, infinite or yet to come, and other than 1 to 10000 '
'jobs (LJ007).';
create or replace function redrive(p_job_id uuid, p_extra_attempts integer default 1)
returns failed_job
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_nestloop = on
set enable_indexscan = on
set enable_sort = off
as $$
declare
    v_now timestamptz;
begin
    if (p_extra_attempts between 1 and 100) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'extra_attempts must be from 1 to 100';
    end if;

    -- A lock that leaves a new version behind: a purge with an older snapshot then
    -- fails to serialize, instead of deleting the job of a live row it cannot see.
    update job as j set producer = j.producer where j.job_id = p_job_id;
    if not found then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may have been purged, or belong to another Instance.';
    end if;

    v_now := clock_timestamp();
    insert into live_job (
        job_id, available_at, attempt, max_attempts, queue, last_failure_code
    )
    select
        j.job_id, v_now, a.attempt, a.attempt + p_extra_attempts, j.queue,
        a.failure_code
    from job as j
    cross join lateral (
        select e.*
        from attempt as e
        where e.job_id = j.job_id
        order by e.attempt desc
        limit 1
    ) as a
    where
        j.job_id = p_job_id
        and a.outcome <> 'succeeded'
        and not exists (select from live_job as l where l.job_id = j.job_id);
    if not found then
        raise exception using
            errcode = 'LJ007',
            message = 'the job has not failed',
            hint    = 'Only a job whose status is failed can be redriven.';
    end if;
    perform _wake(j.queue)
    from job as j
    where j.job_id = p_job_id and _is_awaited(j.queue);

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'redrive',
        jsonb_build_object('job_id', p_job_id, 'extra_attempts', p_extra_attempts), 1
    );
    return ('queued'::text, v_now);
end;
$$;
comment on function redrive(uuid, integer) is
'Queues a failed job again with that many more attempts, its history kept and its '
'fencing token still growing; audited. Refuses an unknown job (LJ006), a job that has '
'not failed, and other than 1 to 100 attempts (LJ007).';
create or replace function retire_expired(p_limit integer default 1000)
returns integer
language plpgsql
security definer
set search_path from current
set jit = off
as $$
declare
    v_count integer;
begin
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;

    -- No index leads here, since one on the lease would be written by every claim: a
    -- walk over the live rows, for an operator's hand and not for a loop.
    v_count := _reclaim(
        array(
            select l.job_id
            from live_job as l
            where
                l.lease_expires_at <= clock_timestamp()
                and l.attempt >= l.max_attempts
            limit p_limit
            for update skip locked
        ),
        p_limit
    );

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'retire_expired', jsonb_build_object('limit', p_limit), v_count
    );
    return v_count;
end;
$$;
comment on function retire_expired(integer) is
'Ends up to p_limit jobs whose last attempt''s lease ran out, as claim does while it '
'passes, and answers how many; audited. Refuses other than 1 to 10000 jobs (LJ007).';
-- The whole permission model. Everything the owner has here is taken from PUBLIC and
-- from the Instance's groups, then given out by this one list; what somebody granted to
-- another role stands, and check reports it. The roles are found through the schema's
-- owner, so that no file names an Instance.
do $$
declare
    v_schema text := current_schema();
    v_prefix text := (
        select left(pg_get_userbyid(n.nspowner), -6)
        from pg_namespace as n
        where n.nspname = v_schema
    );
    v_groups text;
    v_object record;
begin
    select string_agg(format('%I', v_prefix || '_' || g.kind), ', ')
    into v_groups
    from unnest(array['producer', 'worker', 'observer', 'operator']) as g (kind);

    execute format('revoke all on schema %I from public, %s', v_schema, v_groups);
    for v_object in
        select
            case c.relkind when 'S' then 'sequence' else 'table' end as kind,
            format('%I.%I', v_schema, c.relname) as name
        from pg_class as c
        where
            c.relnamespace = v_schema::regnamespace
            and c.relkind in ('r', 'v', 'S')
            and c.relowner = current_role::regrole
        union all
        -- Row types of tables too; an array follows its element.
        select 'type', format('%I.%I', v_schema, t.typname)
        from pg_type as t
        where
            t.typnamespace = v_schema::regnamespace
            and t.typtype in ('c', 'd')
            and t.typowner = current_role::regrole
        union all
        select 'routine', p.oid::regprocedure::text
        from pg_proc as p
        where p.pronamespace = v_schema::regnamespace
    loop
        execute format(
            'revoke all on %s %s from public, %s',
            v_object.kind, v_object.name, v_groups
        );
    end loop;

    execute format('grant usage on schema %I to %s', v_schema, v_groups);
    execute format('grant select on error_code, installed_version to %s', v_groups);
    for v_object in
        select g.name, format('%I', v_prefix || '_' || r.kind) as role
        from (
            values
                ('producer', 'enqueue(text, text, jsonb, text, timestamptz, integer)'),
                ('producer', 'enqueue_many(jsonb)'),

                ('worker', 'claim(text, integer)'),
                ('worker', 'renew(uuid, text)'),
                ('worker', 'renew_many(uuid[], text[])'),
                ('worker', 'complete(uuid, text)'),
                ('worker', 'complete_many(uuid[], text[])'),
                ('worker', 'fail(uuid, text, text, boolean)'),
                ('worker', 'fail_many(uuid[], text[], text[], boolean[])'),
                ('worker', 'next_available_at(text)'),
                ('worker', 'wait_key(text)'),

                ('producer worker observer operator', 'inspect(uuid)'),

                ('operator', 'redrive(uuid, integer)'),
                ('operator', 'purge(timestamptz, integer)'),
                ('operator', 'retire_expired(integer)')
        ) as g (kinds, name)
        cross join unnest(string_to_array(g.kinds, ' ')) as r (kind)
    loop
        execute format(
            'grant execute on function %s to %s', v_object.name, v_object.role
        );
    end loop;
end $$;
