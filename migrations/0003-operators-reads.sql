-- depends: 0002-failures-index
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
create table if not exists installed_object (
    kind   text collate "C" not null,
    name   text collate "C" not null,
    digest text collate "C" not null,

    constraint installed_object_pkey primary key (kind, name)
);
comment on table installed_object is
'What the last migration left behind, for inspect_health to compare with: functions, '
'triggers and views with a digest, indexes, constraints, and the grants of the groups.';
alter table operator_act add column if not exists login text collate "C";
-- Those that are there were acted by somebody else than whoever migrates.
alter table operator_act alter column login set default session_user;
comment on column operator_act.operator is 'The role that acted: by SET ROLE, a group.';
comment on column operator_act.login is
'The role that had logged in; NULL for acts of before it was kept.';
comment on column instance.retention_seconds is
'How long enforce_retention keeps ended jobs; NULL: for ever. Nothing is purged unless '
'somebody calls it, or purge.';
-- Only the command calls it, and it names no parameter.
-- squawk-ignore ban-drop-function
drop function if exists configure(jsonb);
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

    if to_regtype(format('%I.inspected_attempt', v_schema)) is null then
        create type inspected_attempt as (
            attempt          integer,
            worker           text,
            outcome          text,
            leased_at        timestamptz,
            lease_expires_at timestamptz,
            ended_at         timestamptz,
            failure_code     text,
            retryable        boolean,
            retry_at         timestamptz,
            max_attempts     integer
        );
    end if;

    if to_regtype(format('%I.inspected_queue', v_schema)) is null then
        create type inspected_queue as (
            queue            text,
            is_declared      boolean,
            is_estimate      boolean,
            ready            bigint,
            scheduled        bigint,
            retry_waiting    bigint,
            running          bigint,
            expired          bigint,
            oldest_ready_age interval,
            oldest_lapse_at  timestamptz,
            next_due_at      timestamptz,
            last_claimed_at  timestamptz,
            counted_since    timestamptz,
            succeeded        bigint,
            failed           bigint,
            failure_codes    jsonb,
            workers_waiting  integer
        );
    end if;

    if to_regtype(format('%I.inspected_worker', v_schema)) is null then
        create type inspected_worker as (
            worker                text,
            is_declared           boolean,
            is_estimate           boolean,
            leases                bigint,
            expired               bigint,
            oldest_leased_at      timestamptz,
            next_lease_expires_at timestamptz,
            sessions              integer
        );
    end if;

    if to_regtype(format('%I.inspected_failure', v_schema)) is null then
        create type inspected_failure as (
            job_id       uuid,
            queue        text,
            kind         text,
            failure_code text,
            worker       text,
            attempts     integer,
            ended_at     timestamptz
        );
    end if;

    if to_regtype(format('%I.inspected_act', v_schema)) is null then
        create type inspected_act as (
            act_id    bigint,
            acted_at  timestamptz,
            operator  text,
            act       text,
            arguments jsonb,
            job_count integer,
            login     text
        );
    end if;

    if to_regtype(format('%I.inspected_finding', v_schema)) is null then
        create type inspected_finding as (
            severity text,
            finding  text,
            subject  text,
            since    timestamptz,
            detail   text,
            remedy   text
        );
    end if;

    if to_regtype(format('%I.explained_job', v_schema)) is null then
        create type explained_job as (
            job_id       uuid,
            queue        text,
            reason       text,
            since        timestamptz,
            until        timestamptz,
            who          text,
            pid          integer,
            attempt      integer,
            max_attempts integer,
            failure_code text,
            ahead        bigint,
            meaning      text,
            remedy       text
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
comment on type inspected_attempt is
'One attempt of a job: running, with its lease''s end, or ended, with its outcome.';
comment on type inspected_queue is
'One queue: how many of its jobs are ready, scheduled (never begun, due later), '
'waiting for a retry, running, or running under a lease that has expired (the oldest '
'at oldest_lapse_at); and how many ended since counted_since. The five are scaled up '
'from a sample where is_estimate says so.';
comment on type inspected_worker is
'One worker: the leases it holds, and how many sessions of its role, or of one that '
'may take it, are connected to the database. Leases are scaled up from a sample where '
'is_estimate says so.';
comment on type inspected_failure is
'A job that has failed, with its last failure code and attempt.';
comment on type inspected_act is
'One operator act: who did what, when, with what arguments, on how many jobs; and, as '
'login, as whom they had logged in (NULL for acts of before it was kept).';
comment on type inspected_finding is
'Something that is wrong with the Instance: how bad, what, with which object, since '
'when (NULL where that cannot be seen), and what to do.';
comment on type explained_job is
'Why a job is not being claimed: a reason of explain_reason, and its facts. since and '
'until are what the reason says; who and pid the worker, operator or session it names; '
'ahead counts the due jobs before it, to 10,000 at most.';
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
from (values (3)) as v (version);
comment on view installed_version is
'The version of this schema: the number of the last migration that changed it.';
-- The words in which explain_job and inspect_health answer. Both lists only ever grow.
create or replace view explain_reason as
select r.reason, r.meaning, r.remedy
from (
    values
        (
            'ready'::text,
            'It is due. Claims of its queue take the jobs before it first.'::text,
            'Wait, or add workers. A session that had to walk past many other rows '
            'may overlook it for up to 30 seconds.'::text
        ),
        (
            'scheduled',
            'It is not due yet: its producer asked for a later time, or the clock '
            'went back.',
            'Wait until then.'
        ),
        (
            'retry_waiting', 'An attempt has failed, and the next one is not due yet.',
            'Wait until then; the failure code says why.'
        ),
        (
            'leased', 'A worker holds its lease.',
            'Wait for the worker. Without a renewal the lease ends at the time given.'
        ),
        (
            'lease_expired', 'Its lease ran out, and the next claim may take it.',
            'Wait for a claim; if leases run out often, find out what ends the workers.'
        ),
        (
            'attempts_exhausted',
            'The lease of its last attempt ran out; it ends failed in passing.',
            'A claim of its queue or retire_expired ends it; then redrive, if it is to '
            'be tried again.'
        ),
        (
            'row_locked', 'A transaction that is still open holds its row.',
            'Have that session commit or roll back, or end it: pg_terminate_backend. '
            'A prepared transaction needs COMMIT PREPARED or ROLLBACK PREPARED.'
        ),
        (
            'table_locked',
            'A transaction that is still open has locked a whole table.',
            'Have that session commit or roll back, or end it: pg_terminate_backend.'
        ),
        (
            'queue_not_declared', 'Its queue is not in the document any more.',
            'Declare the queue again: lenso-jobs configure.'
        ),
        (
            'instance_damaged',
            'Something that the Instance rests on is missing or changed.',
            'See inspect_health; lenso-jobs check says what mends it.'
        ),
        (
            'no_declared_worker', 'The document names no worker.',
            'Name one in worker_instances: lenso-jobs configure.'
        ),
        (
            'no_worker_connected',
            'No session of a worker''s role, or of one belonging to it, is connected.',
            'Start workers, and look into why they stopped. Sessions of superusers are '
            'not counted.'
        ),
        ('succeeded', 'It has ended: a worker completed it.', 'Nothing.'),
        (
            'failed', 'It has ended: its last attempt failed.',
            'Look at inspect_attempts; redrive queues it again.'
        ),
        (
            'evidence_missing', 'It is not live, and no attempt of it is on record.',
            'Somebody wrote to the tables by hand. Restore the rows, or enqueue anew.'
        ),
        (
            'purged_or_unknown',
            'There is no such job: it was purged, never committed, or never enqueued '
            'here. since is the time in its id, until the end of what was purged.',
            'Look at inspect_acts, and whether the producer committed.'
        )
) as r (reason, meaning, remedy);
comment on view explain_reason is
'Every reason that explain_job gives, what it means and what to do.';

create or replace view health_finding as
select f.finding, f.severity, f.meaning, f.remedy
from (
    values
        (
            'not_configured'::text, 'critical'::text,
            'No configuration is stored, so every call is refused.'::text,
            'lenso-jobs configure'::text
        ),
        (
            'table_locked', 'critical',
            'A session has locked a table against the verbs, which wait.',
            'Have it commit or roll back, or end it: pg_terminate_backend.'
        ),
        (
            'queue_silent', 'critical',
            'Jobs have been due for a minute or more, and none was claimed since.',
            'Start workers, or look into why they do not claim: explain_job of one of '
            'the jobs says more.'
        ),
        (
            'queue_behind', 'warning',
            'Jobs wait for ten minutes or more, though workers are claiming.',
            'Add workers, or find out what makes the handlers slow.'
        ),
        (
            'queue_undeclared', 'warning',
            'A queue that is not declared has jobs that nobody can claim.',
            'Declare it again until its jobs have ended: lenso-jobs configure.'
        ),
        (
            'leases_expired', 'warning',
            'Leases ran out more than a minute ago, and nobody claimed their jobs.',
            'Start workers of that queue; jobs without attempts left end by '
            'retire_expired.'
        ),
        (
            'jobs_failing', 'warning',
            'At least half of the jobs that ended lately, and twenty or more, failed.',
            'inspect_failures shows them; mend the cause, then redrive_failed.'
        ),
        (
            'snapshot_held', 'warning',
            'An old snapshot keeps dead rows from being cleaned up.',
            'End the transaction: pg_terminate_backend, ROLLBACK PREPARED, or '
            'pg_drop_replication_slot. Claims stay flat meanwhile, the table grows.'
        ),
        (
            'transaction_open', 'warning',
            'A transaction that wrote to this Instance has been open for long.',
            'Have it commit or roll back, or end it: pg_terminate_backend.'
        ),
        (
            'autovacuum_behind', 'warning',
            'Many more dead rows than autovacuum should leave.',
            'Look for what holds it up: snapshot_held, or all autovacuum workers busy; '
            'VACUUM the table.'
        ),
        (
            'autovacuum_off', 'critical',
            'Autovacuum is switched off for a table that needs it by the minute.',
            'Set autovacuum and track_counts on, and the table''s autovacuum_enabled.'
        ),
        (
            'table_bloated', 'notice',
            'The table takes far more room than its rows need.',
            'Harmless to claims. In a quiet hour VACUUM FULL it, or use pg_repack.'
        ),
        (
            'notify_queue_filling', 'critical',
            'The server''s queue of notifications fills up; when full, enqueue fails.',
            'End the session that listens inside an open transaction; or set notify to '
            'false: lenso-jobs configure.'
        ),
        (
            'object_changed', 'critical',
            'A table, view, trigger or function is missing, or not as installed.',
            'lenso-jobs check says what mends it.'
        ),
        (
            'index_unusable', 'critical',
            'An index is missing, was never finished, or is not as installed.',
            'lenso-jobs check says what mends it.'
        ),
        (
            'constraint_missing', 'warning',
            'A constraint is missing or not validated.',
            'lenso-jobs check says what mends it.'
        ),
        (
            'object_stray', 'warning',
            'Something in the schema is no part of the Instance.',
            'Drop it, or move it elsewhere.'
        ),
        (
            'grant_missing', 'critical',
            'A group has lost a right that its members need.',
            'lenso-jobs check says what mends it.'
        ),
        (
            'grant_stray', 'warning',
            'Somebody holds a right that the Instance does not give.',
            'Revoke it, if nobody meant it.'
        ),
        (
            'role_missing', 'critical',
            'A role that the Instance rests on does not exist, or was renamed.',
            'lenso-jobs setup makes it; or rename it back.'
        ),
        (
            'membership_missing', 'critical',
            'A declared caller is not a member of its group, and is refused.',
            'lenso-jobs configure'
        ),
        (
            'membership_stray', 'warning',
            'A role is a member of a group, and nobody declared it.',
            'Declare it, or revoke the group from it.'
        ),
        (
            'migration_unfinished', 'critical',
            'A migration is at work, or was cut off.',
            'If none is at work: lenso-jobs upgrade, with --break-lock where it asks '
            'for that'
        ),
        (
            'clock_went_back', 'critical',
            'Times on record lie ahead of the server''s clock.',
            'Correct the clock. Until it has caught up leases hold for longer, and '
            'retries wait for longer.'
        ),
        (
            'retention_overdue', 'notice',
            'Ended jobs are kept for longer than retention_seconds.',
            'Have a scheduler call enforce_retention: lenso-jobs purge --retention.'
        )
) as f (finding, severity, meaning, remedy);
comment on view health_finding is
'Every finding of inspect_health, how bad it is, what it means and what to do.';
create or replace function _explained_absence(p_answer explained_job)
returns explained_job
language plpgsql
stable
as $$
begin
    p_answer.reason := 'purged_or_unknown';
    -- The first 48 bits of a job's id are the milliseconds since 1970.
    if substr(p_answer.job_id::text, 15, 1) = '7' then
        p_answer.since := timestamptz 'epoch' + interval '1 millisecond' * (
            'x' || left(replace(p_answer.job_id::text, '-', ''), 12)
        )::bit(48)::bigint;
    end if;
    select (o.arguments ->> 'before')::timestamptz, o.operator::text
    into p_answer.until, p_answer.who
    from operator_act as o
    where
        o.act = 'purge'
        and o.job_count > 0
        and (o.arguments ->> 'before')::timestamptz > p_answer.since
    order by o.operator_act_id desc
    limit 1;
    return p_answer;
end;
$$;
comment on function _explained_absence(explained_job) is
'Adds when a job of this id would have been made, and the last purge it may have '
'fallen to.';
-- A row that a transaction in progress has locked, changed or deleted names it in xmax.
-- Behind whoever waits to lock a table everybody waits, as behind whoever locked it:
-- reading waits for ACCESS EXCLUSIVE alone, claims for what CREATE INDEX takes, too.
create or replace function _explained_lock(p_answer explained_job, p_locker xid)
returns explained_job
language plpgsql
stable
as $$
begin
    select
        case l.locktype when 'relation' then 'table_locked' else 'row_locked' end,
        l.pid, coalesce(s.usename, x.owner)::text, coalesce(s.xact_start, x.prepared)
    into p_answer.reason, p_answer.pid, p_answer.who, p_answer.since
    from pg_locks as l
    left join pg_stat_activity as s on s.pid = l.pid
    left join pg_prepared_xacts as x
        on l.pid is null
        and exists (
            select
            from pg_locks as o
            where
                o.pid is null
                and o.virtualtransaction = l.virtualtransaction
                and o.transactionid = x.transaction
        )
    where
        l.pid is distinct from pg_backend_pid()
        and case l.locktype
            when 'relation'
                then
                    l.database = (
                        select d.oid
                        from pg_database as d
                        where d.datname = current_database()
                    )
                    and case
                        when p_locker is not null
                            then
                                l.relation = 'live_job'::regclass
                                and l.mode in (
                                    'ShareLock', 'ShareRowExclusiveLock',
                                    'ExclusiveLock'
                                )
                        else
                            l.mode = 'AccessExclusiveLock'
                            and l.relation in (
                                select c.oid
                                from pg_class as c
                                join pg_class as i on i.relnamespace = c.relnamespace
                                where i.oid = 'instance'::regclass
                            )
                    end
            when 'transactionid' then l.granted and l.transactionid = p_locker
        end
    order by l.locktype desc, l.granted desc
    limit 1;
    if not found and _is_in_progress(p_locker) then
        p_answer.reason := 'row_locked';
    end if;
    return p_answer;
end;
$$;
comment on function _explained_lock(explained_job, xid) is
'Adds who holds the row, by the transaction that its xmax names, or a whole table.';
create or replace function _explained_queue(
    p_answer explained_job,
    p_available_at timestamptz,
    p_lease_owner text,
    p_lease_expires_at timestamptz
)
returns explained_job
language plpgsql
stable
as $$
declare
    v_now timestamptz := clock_timestamp();
begin
    p_answer.since := p_available_at;
    if not exists (select from queue as q where q.queue = p_answer.queue) then
        p_answer.reason := 'queue_not_declared';
        return p_answer;
    end if;
    select f.subject into p_answer.who
    from _faults_of_objects() as f
    where f.finding in ('object_changed', 'index_unusable', 'grant_missing')
    order by f.finding, f.subject
    limit 1;
    if found then
        p_answer.reason := 'instance_damaged';
        return p_answer;
    end if;
    if p_lease_owner is null and p_available_at > v_now then
        p_answer.reason
        := case p_answer.attempt when 0 then 'scheduled' else 'retry_waiting' end;
        p_answer.since := null;
        p_answer.until := p_available_at;
        return p_answer;
    end if;
    -- Whoever works or not, it is never begun again.
    if p_lease_owner is not null and p_answer.attempt >= p_answer.max_attempts then
        p_answer.reason := 'attempts_exhausted';
        p_answer.since := p_lease_expires_at;
        p_answer.who := p_lease_owner;
        return p_answer;
    end if;
    if not exists (select from caller as c where c.is_worker) then
        p_answer.reason := 'no_declared_worker';
        return p_answer;
    end if;

    -- Each of them may have lost its role, or its membership.
    if not exists (
        select
        from caller as c
        where
            c.is_worker
            and c.caller not in (
                select f.subject
                from _faults_of_roles() as f
                where f.finding = 'role_missing' or right(f.detail, 7) = '_worker'
            )
    ) then
        p_answer.reason := 'instance_damaged';
        p_answer.who := (
            select 'role ' || min(c.caller)
            from caller as c
            where c.is_worker
        );
        return p_answer;
    end if;

    -- A live lease in the queue proves that somebody works on it.
    if
        _workers_waiting(p_answer.queue) = 0
        and (select sum(w.sessions) from _worker_sessions() as w) = 0
        and not exists (
            select
            from (
                select l.lease_expires_at
                from live_job as l
                where l.queue = p_answer.queue and l.available_at <= v_now
                order by l.available_at, l.job_id
                limit 10000
            ) as f
            where f.lease_expires_at > v_now
        )
    then
        p_answer.reason := 'no_worker_connected';
        return p_answer;
    end if;

    select count(*) into p_answer.ahead
    from (
        select
        from live_job as l
        where
            l.queue = p_answer.queue
            and (l.available_at, l.job_id) < (p_available_at, p_answer.job_id)
            and (l.lease_expires_at is null or l.lease_expires_at <= v_now)
        limit 10000
    ) as b;
    if p_lease_owner is null then
        p_answer.reason := 'ready';
        return p_answer;
    end if;
    p_answer.reason := 'lease_expired';
    p_answer.since := p_lease_expires_at;
    p_answer.who := p_lease_owner;
    return p_answer;
end;
$$;
comment on function _explained_queue(explained_job, timestamptz, text, timestamptz) is
'Adds why a job without a live lease is not claimed yet.';
create or replace function _faults_of_history()
returns table (finding text, subject text, since timestamptz, detail text)
language plpgsql
stable
as $$
declare
    v_newest timestamptz := greatest(
        (select j.created_at::timestamptz from job as j order by j.job_id desc limit 1),
        (
            select a.ended_at::timestamptz
            from attempt as a
            where
                a.outcome in ('succeeded', 'failed')
                or a.failure_code = 'attempts_exhausted'
            order by a.ended_at desc
            limit 1
        )
    );
    v_oldest timestamptz := (
        select a.ended_at::timestamptz
        from attempt as a
        where
            a.outcome in ('succeeded', 'failed')
            or a.failure_code = 'attempts_exhausted'
        order by a.ended_at
        limit 1
    );
    v_keep   interval := (
        select make_interval(secs => i.retention_seconds) from instance as i
    );
begin
    if not exists (select from instance) then
        return query select 'not_configured', 'instance', null::timestamptz, null::text;
    end if;
    -- The clock of a server that took over may be a little behind.
    if v_newest > clock_timestamp() + interval '1 second' then
        return query select
            'clock_went_back', 'the server''s clock', v_newest,
            'behind what is on record by ' || (v_newest - clock_timestamp());
    end if;
    if v_oldest < clock_timestamp() - v_keep * 1.1 - interval '1 hour' then
        return query select
            'retention_overdue', 'the oldest evidence', v_oldest,
            'is to be kept for ' || v_keep;
    end if;

    -- Logical replication and a dump of the rows alone leave the sequence behind.
    if to_regclass(
        format('%I.operator_act_operator_act_id_seq', current_schema())
    ) is not null then
        return query
        select
            'object_changed', 'sequence operator_act_operator_act_id_seq',
            null::timestamptz, 'its next number is taken: every operator act fails'
        from operator_act_operator_act_id_seq as s
        where
            (select max(o.operator_act_id) from operator_act as o)
            > case when s.is_called then s.last_value else 0 end;
    end if;

    -- Where the migration tool keeps its books, if that is what was used. Looked for in
    -- the Instance's schema alone: the caller's own temporary relations come after it.
    if to_regclass(format('%I.yoyo_lock', current_schema())) is not null then
        return query
        select
            'migration_unfinished', 'yoyo_lock', y.ctime::timestamptz,
            'taken by process ' || y.pid
        from yoyo_lock as y;
    end if;
    if to_regclass(format('%I._yoyo_migration', current_schema())) is not null then
        return query
        select
            'migration_unfinished', 'installed_version', null::timestamptz,
            format('the schema is at %s, its books say %s', v.version, m.version)
        from installed_version as v
        cross join (
            select max(substring(y.migration_id from '^[0-9]+')::integer)
            from _yoyo_migration as y
        ) as m (version)
        where v.version <> m.version;
    end if;
end;
$$;
comment on function _faults_of_history() is
'Configuration, clock, retention and migrations, for inspect_health.';
create or replace function _faults_of_objects()
returns table (finding text, subject text, since timestamptz, detail text)
language plpgsql
stable
as $$
begin
    return query
    select
        case
            when kind = 'grant' and o.name is null then 'grant_missing'
            when kind = 'grant' then 'grant_stray'
            when i.name is null then 'object_stray'
            when kind = 'index' then 'index_unusable'
            when kind = 'constraint' then 'constraint_missing'
            else 'object_changed'
        end,
        case kind when 'grant' then name else kind || ' ' || name end,
        null::timestamptz,
        case
            when i.name is null then 'is not part of the Instance'
            when o.name is null then 'is missing'
            else 'is not as it was installed'
        end
    from installed_object as i
    full join _objects() as o using (kind, name)
    where
        i.digest is distinct from o.digest
        -- What a role that is gone has lost is told as role_missing.
        and (
            kind <> 'grant'
            or o.name is not null
            or substring(name from ' to (.*)$') in (select r.rolname from pg_roles as r)
        )
        -- The columns of a table that is none of the Instance's are told with it.
        and (
            kind <> 'column'
            or split_part(name, '.', 1) in (
                select t.name
                from installed_object as t
                where t.kind = 'table'
            )
        )
        -- An index that is being built, concurrently, or built anew beside the old one.
        and (
            kind <> 'index'
            or i.name is not null
            or o.digest <> 'broken'
            or not exists (
                select
                from pg_locks as l
                join pg_stat_activity as s on s.pid = l.pid
                join pg_index as x on x.indrelid = l.relation
                join pg_class as c on c.oid = x.indexrelid
                where
                    c.relnamespace = current_schema()::regnamespace
                    and c.relname = name
                    and l.mode = 'ShareUpdateExclusiveLock'
                    and s.datname = current_database()
                    -- Autovacuum is nobody's.
                    and s.usesysid is not null
            )
        );
end;
$$;
comment on function _faults_of_objects() is
'Differences between what was installed and what is there, for inspect_health.';
create or replace function _faults_of_queues()
returns table (finding text, subject text, since timestamptz, detail text)
language plpgsql
stable
as $$
begin
    return query
    with seen as (
        select
            q.*, clock_timestamp() - q.oldest_ready_age as ready_since,
            q.last_claimed_at > clock_timestamp() + interval '1 second' as is_ahead,
            -- One that lies ahead tells nothing of what was claimed since.
            q.last_claimed_at between
            clock_timestamp() - interval '1 minute'
            and clock_timestamp() + interval '1 minute' as is_moving
        from inspect_queues() as q
    )
    select
        case when q.is_moving then 'queue_behind' else 'queue_silent' end,
        q.queue, q.ready_since,
        format(
            '%s ready, the oldest for %s: %s', q.ready,
            date_trunc('second', q.oldest_ready_age),
            (
                select l.job_id
                from live_job as l
                where l.queue = q.queue and l.lease_owner is null
                order by l.available_at, l.job_id
                limit 1
            )
        )
    from seen as q
    where
        q.is_declared
        and q.oldest_ready_age
        > case when q.is_moving then interval '10 minutes' else interval '1 minute' end
    union all
    select
        'clock_went_back', q.queue, q.last_claimed_at, 'behind a claim of this queue'
    from seen as q
    where q.is_ahead
    union all
    select
        'queue_undeclared', q.queue, null,
        format('%s jobs', q.ready + q.scheduled + q.retry_waiting + q.running + q.expired)
    from seen as q
    where not q.is_declared
    union all
    select
        'leases_expired', q.queue, q.oldest_lapse_at, format('%s leases', q.expired)
    from seen as q
    where q.oldest_lapse_at < clock_timestamp() - interval '1 minute'
    union all
    select
        'jobs_failing', q.queue, q.counted_since,
        format(
            '%s of %s failed; most often: %s', q.failed, q.failed + q.succeeded,
            (
                select c.key
                from jsonb_each(q.failure_codes) as c
                order by c.value::bigint desc, c.key
                limit 1
            )
        )
    from seen as q
    where q.failed >= greatest(20, q.succeeded);
end;
$$;
comment on function _faults_of_queues() is
'Queues that stand still, lag, fail or are not declared, for inspect_health.';
create or replace function _faults_of_roles()
returns table (finding text, subject text, since timestamptz, detail text)
language sql
stable
as $$
    with home as (
        select pg_get_userbyid(n.nspowner)::text as owner
        from pg_class as c
        join pg_namespace as n on n.oid = c.relnamespace
        where c.oid = 'instance'::regclass
    ),
    prefix as (
        select left(h.owner, -6) as name
        from home as h
        where right(h.owner, 6) = '_owner'
    ),
    team as (
        select g.kind, p.name || '_' || g.kind as name, r.oid
        from prefix as p
        cross join unnest(
            array['owner', 'producer', 'worker', 'observer', 'operator']
        ) as g (kind)
        left join pg_roles as r on r.rolname = p.name || '_' || g.kind
    ),
    declared as (
        select c.caller, g.kind
        from caller as c
        cross join lateral (
            values
                ('producer', c.is_producer), ('worker', c.is_worker),
                ('observer', c.is_observer)
        ) as g (kind, is_meant)
        where g.is_meant
    ),
    -- From 16 on whoever made a role administers it, without inheriting anything.
    member as (
        select
            t.kind, t.name as team, r.rolname::text as caller,
            pg_has_role(r.oid, h.owner, 'member') as is_administrator
        from team as t
        cross join home as h
        join pg_auth_members as m on m.roleid = t.oid
        join pg_roles as r on r.oid = m.member
        where
            t.kind in ('producer', 'worker', 'observer')
            and coalesce((to_jsonb(m) ->> 'inherit_option')::boolean, r.rolinherit)
    )
    select 'role_missing', t.name, null::timestamptz, 'a group role of this Instance'
    from team as t
    where t.oid is null
    union all
    -- Of a renamed owner the other names cannot be told.
    select
        'role_missing', h.owner, null::timestamptz,
        'owns the Instance, and is not called as its owner is'
    from home as h
    where right(h.owner, 6) <> '_owner'
    union all
    select distinct 'role_missing', d.caller, null::timestamptz, 'a declared caller'
    from declared as d
    where not exists (select from pg_roles as r where r.rolname = d.caller)
    union all
    select
        'membership_missing', d.caller, null::timestamptz,
        'should be a member of ' || t.name
    from declared as d
    join team as t on t.kind = d.kind and t.oid is not null
    join pg_roles as r on r.rolname = d.caller
    where not exists (
        select from member as m where m.caller = d.caller and m.kind = d.kind
    )
    union all
    select
        'membership_stray', m.caller, null::timestamptz, 'is a member of ' || m.team
    from member as m
    where
        not exists (
            select from declared as d where d.caller = m.caller and d.kind = m.kind
        )
        -- Who set it up is a member of the owner, and may have to hand out the groups.
        and not (
            m.is_administrator
            and m.caller not in (select d.caller from declared as d)
        )
$$;
comment on function _faults_of_roles() is
'Missing roles, and memberships that are missing or not declared, for inspect_health.';
-- Since when a transaction is open only a member of pg_read_all_stats is told, so where
-- that is hidden its age in transactions must do.
create or replace function _faults_of_sessions()
returns table (finding text, subject text, since timestamptz, detail text)
language sql
stable
as $$
    with session as (
        select
            'session ' || s.pid as name, s.pid::text as place, s.xact_start as since,
            s.backend_xmin as xmin, s.backend_xid as xid, s.usename::text as who,
            r.pid is not null as is_a_standbys
        from pg_stat_activity as s
        left join pg_stat_replication as r on r.pid = s.pid
        where
            s.pid <> pg_backend_pid()
            and (
                (s.datname = current_database() and s.usesysid is not null)
                -- Whoever is only connecting is in no database, with a snapshot, too.
                or r.pid is not null
            )
        union all
        select
            'prepared transaction ' || x.gid,
            (
                select l.virtualtransaction
                from pg_locks as l
                where l.pid is null and l.transactionid = x.transaction
            ),
            x.prepared, x.transaction, x.transaction, x.owner::text, false
        from pg_prepared_xacts as x
        where x.database = current_database()
        union all
        select
            'replication slot ' || r.slot_name, null, null, r.xmin, null,
            case when r.active then 'active' else 'not active' end, true
        from pg_replication_slots as r
        where r.xmin is not null
    ),
    -- Also in another database, where the numbers of tables may be the same: whoever it
    -- is, is not among the sessions above.
    held as (
        select
            coalesce(l.pid::text, l.virtualtransaction) as place,
            min(concat(
                c.relname,
                case when l.granted then ' is locked' else ' is about to be locked' end
            )) filter (where w.is_a_lock) as locked
        from pg_locks as l
        join pg_class as c on c.oid = l.relation
        join pg_class as i on i.relnamespace = c.relnamespace
        cross join lateral (
            -- Reading waits for the first, writing for the others, and behind whoever
            -- waits for them; of the instance's row the verbs only read.
            select
                l.mode = 'AccessExclusiveLock'
                or (
                    l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock')
                    and c.oid in (
                        'job'::regclass, 'live_job'::regclass, 'attempt'::regclass
                    )
                ) as is_a_lock
        ) as w
        where
            l.locktype = 'relation'
            and i.oid = 'instance'::regclass
            and (
                w.is_a_lock
                or (
                    l.granted
                    -- VACUUM, ANALYZE and CREATE INDEX CONCURRENTLY write no rows.
                    and l.mode not in (
                        'AccessShareLock', 'SIReadLock', 'ShareUpdateExclusiveLock'
                    )
                    and c.oid in (
                        'instance'::regclass, 'job'::regclass, 'live_job'::regclass,
                        'attempt'::regclass
                    )
                )
            )
        group by 1
    ),
    seen as (
        select
            s.*, h.place is not null as is_holding, h.locked,
            clock_timestamp() - s.since as age,
            format(
                'by %s, %s', coalesce(s.who, 'nobody that is known'),
                case
                    when s.since is not null
                        then 'open for '
                        || date_trunc('second', clock_timestamp() - s.since)
                    when coalesce(s.xmin, s.xid) is null then 'since when is hidden'
                    else age(coalesce(s.xmin, s.xid)) || ' transactions old'
                end
            ) as detail
        from session as s
        left join held as h on h.place = s.place
    )
    select 'table_locked', s.name, s.since, s.locked || ' ' || s.detail
    from seen as s
    where s.locked is not null
    union all
    select 'transaction_open', s.name, s.since, s.detail
    from seen as s
    where
        s.is_holding
        and s.locked is null
        and coalesce(s.age > interval '1 minute', age(s.xid) > 1000)
    union all
    select 'snapshot_held', s.name, s.since, s.detail
    from seen as s
    where
        s.xmin is not null
        -- Standbys tell of theirs every ten seconds, many transactions late.
        and coalesce(
            s.age > interval '5 minutes',
            age(s.xmin) > case when s.is_a_standbys then 100000 else 5000 end
        )
$$;
comment on function _faults_of_sessions() is
'Locked tables, open transactions and old snapshots, for inspect_health.';
create or replace function _faults_of_storage()
returns table (finding text, subject text, since timestamptz, detail text)
language sql
stable
as $$
    with kept as (
        select
            c.relname::text as name, s.last_autovacuum, s.n_live_tup, s.n_dead_tup,
            pg_relation_size(c.oid) as size,
            exists (
                select
                from pg_options_to_table(c.reloptions) as o
                where
                    o.option_name = 'autovacuum_enabled'
                    and o.option_value::boolean is false
            ) as is_left_out
        from pg_class as c
        join pg_stat_user_tables as s on s.relid = c.oid
        where c.oid in ('job'::regclass, 'live_job'::regclass, 'attempt'::regclass)
    )
    select
        'autovacuum_off', v.subject, null::timestamptz, v.subject || ' is off'
    from unnest(array['autovacuum', 'track_counts']) as v (subject)
    where current_setting(v.subject) = 'off'
    union all
    select 'autovacuum_off', k.name, null, 'autovacuum_enabled is off'
    from kept as k
    where k.is_left_out
    union all
    -- live_job asks for it at 2,000 dead rows, the others at a fifth of the table.
    select
        'autovacuum_behind', k.name, k.last_autovacuum,
        format('%s dead rows, %s live ones', k.n_dead_tup, k.n_live_tup)
    from kept as k
    where
        k.n_dead_tup
        > 50000 + case k.name when 'live_job' then 0 else k.n_live_tup / 2 end
    union all
    select
        'table_bloated', k.name, null,
        format('%s for %s live rows', pg_size_pretty(k.size), k.n_live_tup)
    from kept as k
    where k.name = 'live_job' and k.size > 268435456 + 10000 * k.n_live_tup
    union all
    select
        'notify_queue_filling', 'the whole server', null,
        format('%s %% full', round(u.usage::numeric * 100))
    from pg_notification_queue_usage() as u (usage)
    where u.usage > 0.25
$$;
comment on function _faults_of_storage() is
'Vacuum, bloat and the queue of notifications, for inspect_health.';
-- pg_locks names no savepoint that was released, though rows go on naming it. age()
-- counts from this transaction's own number if it has one: its own savepoints are left
-- out, as is what is no transaction's number, which pg_xact_status may refuse.
create or replace function _is_in_progress(p_transaction xid)
returns boolean
language sql
stable
as $$
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
comment on function _is_in_progress(xid) is
'Whether another transaction, or a part of it, is still open.';
-- Asked before anything is read: what reads a table that is gone fails.
create or replace function _missing_table()
returns text
language sql
stable
as $$
    select t.name
    from unnest(array[
        'instance', 'caller', 'queue', 'job', 'live_job', 'attempt', 'operator_act',
        'installed_object'
    ]) as t (name)
    where to_regclass(t.name) is null
    limit 1
$$;
comment on function _missing_table() is
'One of the tables of the Instance that does not exist; NULL while all do.';
-- The digest of what a dump and another server version leave as it is; check compares
-- everything else.
create or replace function _objects()
returns table (kind text, name text, digest text)
language sql
stable
set quote_all_identifiers = off
as $$
    with home as (
        select n.oid, n.nspowner
        from pg_namespace as n
        where n.nspname = current_schema()
    ),
    relation as (
        select c.*
        from pg_class as c
        join home as h on h.oid = c.relnamespace
        where c.relname !~ '^_?yoyo_'
    )
    select
        'function', p.oid::regprocedure::text,
        md5(concat_ws(
            '|', p.prosrc, p.prosecdef, p.provolatile, p.proisstrict, p.proparallel,
            p.prorettype::regtype,
            p.proowner = h.nspowner,
            array(select c.setting from unnest(p.proconfig) as c (setting) order by 1)
        ))
    from pg_proc as p
    join home as h on h.oid = p.pronamespace
    union all
    select
        case r.relkind when 'v' then 'view' when 'S' then 'sequence' else 'table' end,
        r.relname::text,
        -- Row security that is forced hides every row from the functions.
        concat(r.relpersistence, r.relrowsecurity and r.relforcerowsecurity)
    from relation as r
    where r.relkind in ('r', 'v', 'S', 'm', 'p', 'f')
    union all
    select
        'column', r.relname || '.' || t.attname,
        concat(format_type(t.atttypid, t.atttypmod), t.attnotnull, t.attidentity)
    from pg_attribute as t
    join relation as r on r.oid = t.attrelid
    where r.relkind = 'r' and t.attnum > 0 and not t.attisdropped
    union all
    select 'trigger', r.relname || '.' || t.tgname, concat(t.tgenabled, t.tgtype)
    from pg_trigger as t
    join relation as r on r.oid = t.tgrelid
    where not t.tgisinternal
    union all
    select 'rule', r.relname || '.' || w.rulename, w.ev_enabled::text
    from pg_rewrite as w
    join relation as r on r.oid = w.ev_class
    where w.rulename <> '_RETURN'
    union all
    select
        'index', r.relname::text,
        case when i.indisvalid and i.indisready then concat_ws(
            '|', i.indisunique, i.indpred is null, i.indoption,
            array(
                select t.attname
                from unnest(i.indkey::smallint[]) with ordinality as k (attnum, place)
                join pg_attribute as t
                    on t.attrelid = i.indrelid and t.attnum = k.attnum
                order by k.place
            )
        ) else 'broken' end
    from pg_index as i
    join relation as r on r.oid = i.indexrelid
    union all
    select
        'constraint', coalesce(r.relname, t.typname) || '.' || k.conname,
        k.convalidated::text
    from pg_constraint as k
    join home as h on h.oid = k.connamespace
    left join relation as r on r.oid = k.conrelid
    left join pg_type as t on t.oid = k.contypid
    where k.contype in ('p', 'u', 'c', 'x') and num_nonnulls(r.oid, t.oid) > 0
    union all
    select
        'grant',
        format(
            '%s on %s to %s', lower(a.privilege_type), o.name,
            case a.grantee when 0 then 'public' else pg_get_userbyid(a.grantee) end
        ),
        ''
    from home as h
    cross join lateral (
        select 'the schema', n.nspacl from pg_namespace as n where n.oid = h.oid
        union all
        select p.oid::regprocedure::text, coalesce(p.proacl, acldefault('f', p.proowner))
        from pg_proc as p
        where p.pronamespace = h.oid
        union all
        select r.relname::text, r.relacl
        from relation as r
        union all
        select r.relname || '.' || t.attname, t.attacl
        from relation as r
        join pg_attribute as t on t.attrelid = r.oid
        where t.attacl is not null
        union all
        select 'type ' || t.typname, coalesce(t.typacl, acldefault('T', t.typowner))
        from pg_type as t
        left join relation as r on r.oid = t.typrelid
        where
            t.typnamespace = h.oid
            and (t.typtype = 'd' or (t.typtype = 'c' and r.relkind = 'c'))
    ) as o (name, acl)
    cross join lateral aclexplode(o.acl) as a
    where a.grantee <> h.nspowner
$$;
comment on function _objects() is
'What the schema holds, as installed_object keeps it: functions, tables, columns, '
'views, triggers, rules, indexes, constraints, and every grant to another role than '
'the owner.';
create or replace function _requeue(
    p_job_ids uuid[], p_extra_attempts integer, out jobs integer,
    out available_at timestamptz
)
language plpgsql
volatile
as $$
begin
    -- A lock that leaves a new version behind: a purge with an older snapshot then
    -- fails to serialize, instead of deleting the job of a live row it cannot see.
    update job as j set producer = j.producer where j.job_id = any (p_job_ids);

    available_at := clock_timestamp();
    insert into live_job (
        job_id, available_at, attempt, max_attempts, queue, last_failure_code
    )
    select
        j.job_id, _requeue.available_at, a.attempt, a.attempt + p_extra_attempts,
        j.queue, a.failure_code
    from unnest(p_job_ids) as p (job_id)
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
    where
        a.outcome <> 'succeeded'
        and (select l.job_id from live_job as l where l.job_id = p.job_id) is null;
    get diagnostics jobs = row_count;
end;
$$;
comment on function _requeue(uuid[], integer) is
'Queues those of the jobs that have failed again, due at once, with that many more '
'attempts each; answers how many.';
-- Up to 64 MB are read whole, which is a quarter of a million live jobs.
create or replace function _share_to_read()
returns real
language sql
volatile
as $$
    select least(100, 6710886400 / greatest(1, pg_relation_size('live_job'::regclass)))
        ::real
$$;
comment on function _share_to_read() is
'What percentage of the pages of live_job a count reads.';
-- Who another session has become by SET ROLE cannot be seen, so whoever may take a
-- worker's role counts; a superuser may take any, and tells nothing. From 16 on who
-- made a role is a member, and may not take it.
create or replace function _worker_sessions()
returns table (worker text, sessions integer)
language sql
stable
as $$
    select c.caller::text, count(s.pid)::integer
    from caller as c
    left join pg_roles as r on r.rolname = c.caller
    left join (
        select a.pid, a.usesysid
        from pg_stat_activity as a
        join pg_roles as u on u.oid = a.usesysid
        where
            a.datname = current_database()
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
    group by c.caller
$$;
comment on function _worker_sessions() is
'For each declared worker how many sessions in this database may act as it.';
create or replace function _workers_waiting(p_queue text)
returns integer
language sql
stable
as $$
    select count(*)::integer
    from pg_locks as l
    where
        l.locktype = 'advisory'
        and l.objsubid = 1
        and l.mode = 'ShareLock'
        and l.granted
        and l.database = (
            select d.oid from pg_database as d where d.datname = current_database()
        )
        and (l.classid::bigint << 32) | l.objid::bigint = _advisory_key(p_queue)
$$;
comment on function _workers_waiting(text) is
'How many sessions wait for a queue, as wait_key has them.';
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
        where
            l.job_id = i.job_id
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
        worker, outcome, lease_token_hash
    )
    select
        e.job_id, e.leased_at, e.ended_at, e.attempt, e.max_attempts,
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
        select distinct on (i.job_id) l.ctid, i.*
        from (
            select u.*
            from unnest(p_job_ids, p_lease_tokens, p_failure_codes, p_retryable)
            with ordinality as u (job_id, lease_token, failure_code, retryable)
            where _is_name(u.failure_code, 128) and u.retryable is not null
            order by u.job_id, u.ordinality
        ) as i
        cross join lateral (
            select l.ctid
            from live_job as l
            where
                l.job_id = i.job_id
                and l.lease_token_hash = sha256(convert_to(i.lease_token, 'UTF8'))
                and l.lease_owner = v_caller
            for update
        ) as l
        order by i.job_id, i.ordinality
    ) as m;

    -- A retry moves its row in every index, so it is taken out and put back: rows found
    -- by their place leave the planner no join to choose.
    with taken as (
        delete from live_job as l
        where l.ctid = any (v_rows) and l.lease_expires_at > clock_timestamp()
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
            and (v_mine[i.ordinality] is null or l.lease_expires_at > v_now)
    order by i.ordinality;
end;
$$;
comment on function renew_many(uuid[], text[]) is
'Renews many leases at once and answers one row an item in input order: renewed with '
'its new end, invalid_lease, or busy where another session holds the job''s row at the '
'moment. Refuses other than two parallel lists of 1 to 1000 items (LJ007).';
create or replace function explain_job(p_job_id uuid)
returns explained_job
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
    v_now    timestamptz := clock_timestamp();
    v_answer explained_job;
    v_job    record;
begin
    if p_job_id is null then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'job_id must not be NULL.';
    end if;
    v_answer.job_id := p_job_id;

    if _missing_table() is not null then
        v_answer.reason := 'instance_damaged';
        v_answer.who := 'table ' || _missing_table();
    else
        v_answer := _explained_lock(v_answer, null);
    end if;
    if v_answer.reason is null then
        select
            j.queue::text, l.xmax as locker, l.job_id is not null as is_live,
            coalesce(l.attempt, a.attempt) as attempt,
            coalesce(l.max_attempts, a.max_attempts) as max_attempts,
            coalesce(l.last_failure_code, a.failure_code)::text as failure_code,
            l.lease_owner::text, l.leased_at::timestamptz, l.lease_expires_at,
            l.available_at, a.worker::text, a.outcome, a.ended_at::timestamptz
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
        where j.job_id = p_job_id;

        if not found then
            v_answer := _explained_absence(v_answer);
        else
            v_answer.queue := v_job.queue;
            v_answer.attempt := v_job.attempt;
            v_answer.max_attempts := v_job.max_attempts;
            v_answer.failure_code := v_job.failure_code;
            if v_job.is_live then
                v_answer := _explained_lock(v_answer, v_job.locker);
            else
                v_answer.since := v_job.ended_at;
                v_answer.who := v_job.worker;
                v_answer.reason := case
                    when v_job.outcome is null then 'evidence_missing'
                    when v_job.outcome = 'succeeded' then 'succeeded'
                    else 'failed'
                end;
            end if;
            if v_answer.reason is null and v_job.lease_expires_at > v_now then
                v_answer.reason := 'leased';
                v_answer.since := v_job.leased_at;
                v_answer.until := v_job.lease_expires_at;
                v_answer.who := v_job.lease_owner;
            end if;
            if v_answer.reason is null then
                v_answer := _explained_queue(
                    v_answer, v_job.available_at, v_job.lease_owner,
                    v_job.lease_expires_at
                );
            end if;
        end if;
    end if;

    select r.meaning, r.remedy into v_answer.meaning, v_answer.remedy
    from explain_reason as r
    where r.reason = v_answer.reason;
    return v_answer;
end;
$$;
comment on function explain_job(uuid) is
'Why a job is not being claimed: one reason of explain_reason, with its facts, what it '
'means and what to do. Changes and locks nothing. Refuses NULL (LJ006).';
create or replace function inspect_acts(
    p_limit integer default 100, p_before bigint default null
)
returns setof inspected_act
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
begin
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;

    return query
    select
        o.operator_act_id, o.acted_at, o.operator::text, o.act::text, o.arguments,
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
begin
    if not exists (select from job as j where j.job_id = p_job_id) then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may have been purged, or belong to another Instance.';
    end if;

    return query
    select
        a.attempt, a.worker::text, a.outcome::text, a.leased_at::timestamptz,
        null::timestamptz, a.ended_at::timestamptz, a.failure_code::text, a.retryable,
        a.retry_at::timestamptz, a.max_attempts
    from attempt as a
    where a.job_id = p_job_id
    order by a.attempt;

    return query
    select
        l.attempt, l.lease_owner::text, 'running', l.leased_at::timestamptz,
        l.lease_expires_at::timestamptz, null::timestamptz, null, null::boolean,
        null::timestamptz, l.max_attempts
    from live_job as l
    where l.job_id = p_job_id and l.lease_owner is not null;
end;
$$;
comment on function inspect_attempts(uuid) is
'The history of one job: one row an attempt, in order; the last is running while it '
'holds a lease, live or expired. Refuses an unknown job (LJ006).';
create or replace function inspect_failures(
    p_queue text default null,
    p_since timestamptz default null,
    p_limit integer default 100,
    p_failure_code text default null,
    p_before timestamptz default null,
    p_before_job_id uuid default null
)
returns setof inspected_failure
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
begin
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using
            errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;
    if p_queue is not null then
        perform _require_queue(p_queue);
    end if;

    return query
    select
        j.job_id, j.queue::text, j.kind::text, a.failure_code::text, a.worker::text,
        a.attempt, a.ended_at::timestamptz
    from (
        select e.*
        from attempt as e
        where
            (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
            and e.ended_at >= coalesce(p_since, '-infinity')
            and (e.ended_at, e.job_id) < (
                coalesce(p_before, 'infinity'),
                coalesce(
                    p_before_job_id, uuid '00000000-0000-0000-0000-000000000000'
                )
            )
            and (
                p_failure_code is null
                or e.failure_code = p_failure_code collate "C"
            )
        order by e.ended_at desc, e.job_id desc
    ) as a
    cross join lateral (
        select i.*
        from job as i
        where
            i.job_id = a.job_id
            and (p_queue is null or i.queue = p_queue collate "C")
            and (select l.job_id from live_job as l where l.job_id = a.job_id) is null
            and a.attempt = (
                select max(n.attempt) from attempt as n where n.job_id = a.job_id
            )
        offset 0
    ) as j
    order by a.ended_at desc, a.job_id desc
    limit p_limit;
end;
$$;
comment on function
inspect_failures(text, timestamptz, integer, text, timestamptz, uuid) is
'The jobs that have failed and were not redriven, newest first: of one queue or all '
'(NULL), since a time or ever (NULL), with one failure code or any (NULL). The next '
'page is asked for with ended_at and job_id of the last row. Refuses a queue that is '
'not declared (LJ003), a malformed failure code (LJ005), other than 1 to 10000 rows '
'(LJ007).';
create or replace function inspect_health()
returns setof inspected_finding
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
    v_missing text := _missing_table();
begin
    if v_missing is not null then
        return query
        select
            h.severity, h.finding, 'table ' || v_missing, null::timestamptz,
            'is missing', h.remedy
        from health_finding as h
        where h.finding = 'object_changed';
        return;
    end if;

    -- Behind a lock on a whole table everything else would wait, too.
    if (_explained_lock(null, null)).reason is not null then
        return query
        select h.severity, f.finding, f.subject, f.since, f.detail, h.remedy
        from _faults_of_sessions() as f
        join health_finding as h on h.finding = f.finding;
        return;
    end if;

    return query
    with found as (
        select s.* from _faults_of_sessions() as s
        union all
        select o.* from _faults_of_objects() as o
        union all
        select r.* from _faults_of_roles() as r
        union all
        select h.* from _faults_of_history() as h
        union all
        select q.* from _faults_of_queues() as q
        union all
        select s.* from _faults_of_storage() as s
    )
    select h.severity, f.finding, f.subject, f.since, f.detail, h.remedy
    from found as f
    join health_finding as h on h.finding = f.finding
    order by
        array_position(array['critical', 'warning', 'notice'], h.severity),
        -- Causes before what comes of them.
        f.finding in ('queue_silent', 'queue_behind', 'leases_expired'),
        f.finding, f.subject;
end;
$$;
comment on function inspect_health() is
'One row for each thing that is wrong: how bad, what, with which object, since when, '
'and what to do; none while all is well. health_finding lists them all. For since when '
'transactions of other roles are open, the owner needs pg_read_all_stats.';
create or replace function inspect_queues()
returns setof inspected_queue
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
    v_now   timestamptz := clock_timestamp();
    v_from  timestamptz := v_now - interval '5 minutes';
    v_share real        := _share_to_read();
begin
    return query
    with live as (
        select
            l.queue,
            count(*) filter (
                where l.lease_owner is null and l.available_at <= v_now
            ) as ready,
            count(*) filter (
                where l.lease_owner is null and l.available_at > v_now and l.attempt = 0
            ) as scheduled,
            count(*) filter (
                where l.lease_owner is null and l.available_at > v_now and l.attempt > 0
            ) as retry_waiting,
            count(*) filter (where l.lease_expires_at > v_now) as running,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            min(l.lease_expires_at) filter (where l.lease_expires_at <= v_now)
            as oldest_lapse_at,
            max(l.leased_at) as last_claimed_at
        from live_job as l tablesample system (v_share)
        group by l.queue
    ),
    -- A job's row is found by its key behind a fence, and of the ends only so many are
    -- read as a second or so of a busy Instance holds.
    ends as materialized (
        select j.queue, e.*
        from (
            select a.job_id, a.leased_at, a.ended_at, a.outcome, a.failure_code
            from attempt as a
            where
                a.ended_at > v_from
                and (
                    a.outcome in ('succeeded', 'failed')
                    or a.failure_code = 'attempts_exhausted'
                )
            order by a.ended_at desc
            limit 10000
        ) as e
        cross join lateral (
            select i.queue from job as i where i.job_id = e.job_id offset 0
        ) as j
    ),
    codes as (
        select e.queue, e.failure_code, count(*) as number
        from ends as e
        where e.outcome <> 'succeeded'
        group by e.queue, e.failure_code
    ),
    ended as (
        select
            e.queue,
            count(*) filter (where e.outcome = 'succeeded') as succeeded,
            count(*) filter (where e.outcome <> 'succeeded') as failed,
            max(e.leased_at) as last_claimed_at,
            (
                select jsonb_object_agg(c.failure_code, c.number)
                from codes as c
                where c.queue = e.queue
            ) as failure_codes
        from ends as e
        group by e.queue
    ),
    named as (
        select q.queue from queue as q
        union
        select l.queue from live as l
    )
    select
        n.queue::text,
        exists (select from queue as q where q.queue = n.queue), v_share < 100,
        coalesce(round(l.ready * 100 / v_share)::bigint, 0),
        coalesce(round(l.scheduled * 100 / v_share)::bigint, 0),
        coalesce(round(l.retry_waiting * 100 / v_share)::bigint, 0),
        coalesce(round(l.running * 100 / v_share)::bigint, 0),
        coalesce(round(l.expired * 100 / v_share)::bigint, 0),
        v_now - (
            select r.available_at::timestamptz
            from live_job as r
            where
                r.queue = n.queue
                and r.available_at <= v_now
                and r.lease_expires_at is null
            order by r.available_at, r.job_id
            limit 1
        ),
        least(l.oldest_lapse_at, h.oldest_lapse_at)::timestamptz,
        (
            select r.available_at::timestamptz
            from live_job as r
            where r.queue = n.queue and r.available_at > v_now
            order by r.available_at, r.job_id
            limit 1
        ),
        greatest(l.last_claimed_at, h.last_claimed_at, e.last_claimed_at)::timestamptz,
        case
            when (select count(*) from ends) = 10000
                then (select min(x.ended_at) from ends as x)::timestamptz
            else v_from
        end,
        coalesce(e.succeeded, 0), coalesce(e.failed, 0),
        coalesce(e.failure_codes, '{}'), _workers_waiting(n.queue)
    from named as n
    left join live as l on l.queue = n.queue
    left join ended as e on e.queue = n.queue
    -- A sample may miss the few that run, which lie where claims begin.
    cross join lateral (
        select
            max(f.leased_at) as last_claimed_at,
            min(f.lease_expires_at) filter (where f.lease_expires_at <= v_now)
            as oldest_lapse_at
        from (
            select r.leased_at, r.lease_expires_at
            from live_job as r
            where r.queue = n.queue and r.available_at <= v_now and v_share < 100
            order by r.available_at, r.job_id
            limit 10000
        ) as f
    ) as h
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
    v_now   timestamptz := clock_timestamp();
    v_share real        := _share_to_read();
begin
    return query
    with held as (
        select
            l.lease_owner, count(*) as leases,
            count(*) filter (where l.lease_expires_at <= v_now) as expired,
            min(l.leased_at) as oldest_leased_at,
            min(l.lease_expires_at) filter (where l.lease_expires_at > v_now)
            as next_lease_expires_at
        from live_job as l tablesample system (v_share)
        where l.lease_owner is not null
        group by l.lease_owner
    )
    select
        coalesce(w.worker, h.lease_owner), w.worker is not null, v_share < 100,
        coalesce(round(h.leases * 100 / v_share)::bigint, 0),
        coalesce(round(h.expired * 100 / v_share)::bigint, 0),
        h.oldest_leased_at::timestamptz, h.next_lease_expires_at::timestamptz,
        coalesce(w.sessions, 0)
    from _worker_sessions() as w
    full join held as h on h.lease_owner = w.worker
    order by 1;
end;
$$;
comment on function inspect_workers() is
'Each declared worker, and each that still holds leases: how many, the oldest, when '
'the next one ends, and how many sessions may act as it. Reads the live jobs, at most '
'64 MB of them.';
-- Runs with the rights of whoever calls it, and only the owner may.
create or replace function configure(
    p_document    jsonb,
    p_drop_queues boolean default false
)
returns boolean
language plpgsql
set search_path from current
set lock_timeout = '5s'
as $$
declare
    v_fault   text    := _document_fault(p_document, current_schema());
    v_queues  text[];
    v_held    text;
    v_count   integer;
    v_changes integer := 0;
begin
    if v_fault is not null then
        raise exception using errcode = 'LJ007', message = v_fault;
    end if;
    if p_drop_queues is null then
        raise exception using
            errcode = 'LJ007',
            message = 'whether to drop queues that have live jobs must be said';
    end if;
    -- An older snapshot would not show the jobs of a queue that is left out.
    if current_setting('transaction_isolation') not like 'read %' then
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

    if exists (select from queue as q where q.queue <> all (v_queues)) then
        -- Whoever enqueues has read the instance's row and so holds the table until its
        -- transaction ends: behind this lock every job of the queue can be seen, but
        -- for those that a transaction with an older snapshot may still add. Every verb
        -- waits behind whoever waits for it, hence the timeout above.
        if not p_drop_queues then
            lock table instance in access exclusive mode;
            -- Counted so far and no further: everybody waits.
            select string_agg(format(
                '%s (%s)', q.queue,
                case when h.jobs > 10000 then 'more than 10000' else h.jobs::text end
            ), ', ' order by q.queue)
            into v_held
            from queue as q
            cross join lateral (
                select count(*) as jobs
                from (
                    select from live_job as l where l.queue = q.queue limit 10001
                ) as l
            ) as h
            where q.queue <> all (v_queues) and h.jobs > 0;
            if v_held is not null then
                raise exception using
                    errcode = 'LJ007',
                    message = format(
                        'queues that the document leaves out still have live jobs: %s',
                        v_held
                    ),
                    hint    = 'Declare them until their jobs have ended. Or drop them '
                              'all the same, lenso-jobs configure --drop-queues: the '
                              'jobs wait until their queue is declared again.';
            end if;
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
comment on function configure(jsonb, boolean) is
'Stores policy, queues and callers as the configuration document has them, and answers '
'whether anything changed; audited. For the owner alone; memberships are '
'bootstrap.sql''s. Refuses unknown fields, another schema''s document, and to leave '
'out a queue that has live jobs (LJ007), unless the second argument says to drop it: '
'the jobs stay, and wait until the queue is declared again.';
create or replace function enforce_retention(p_limit integer default 1000)
returns integer
language plpgsql
security definer
set search_path from current
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
declare
    v_before timestamptz;
begin
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;

    select clock_timestamp() - make_interval(secs => i.retention_seconds)
    into v_before
    from instance as i;
    return case when v_before is null then 0 else purge(v_before, p_limit) end;
end;
$$;
comment on function enforce_retention(integer) is
'Purges up to p_limit jobs that ended longer than retention_seconds ago, and answers '
'how many: 0 where none is set. For any scheduler, again and again until it answers '
'fewer than p_limit; audited as purge. Refuses other than 1 to 10000 jobs (LJ007).';
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
    v_jobs integer;
    v_now  timestamptz;
begin
    if (p_extra_attempts between 1 and 100) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'extra_attempts must be from 1 to 100';
    end if;

    select q.jobs, q.available_at into v_jobs, v_now
    from _requeue(array[p_job_id], p_extra_attempts) as q;
    if not exists (select from job as j where j.job_id = p_job_id) then
        raise exception using
            errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may have been purged, or belong to another Instance.';
    end if;
    if v_jobs = 0 then
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
create or replace function redrive_failed(
    p_queue text,
    p_since timestamptz,
    p_before timestamptz default null,
    p_failure_code text default null,
    p_limit integer default 100,
    p_extra_attempts integer default 1
)
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
    perform _require_queue(p_queue);
    if p_since is null then
        raise exception using
            errcode = 'LJ007',
            message = 'since must not be NULL',
            hint    = 'A job that failed before that time is left alone.';
    end if;
    if p_failure_code is not null and not _is_name(p_failure_code, 128) then
        raise exception using
            errcode = 'LJ005',
            message = 'failure_code must be 1 to 128 characters of A-Z a-z 0-9 . _ : / -';
    end if;
    if (p_limit between 1 and 10000) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'limit must be from 1 to 10000';
    end if;
    if (p_extra_attempts between 1 and 100) is not true then
        raise exception using
            errcode = 'LJ007',
            message = 'extra_attempts must be from 1 to 100';
    end if;

    v_job_ids := array(
        select j.job_id
        from (
            select e.job_id, e.attempt
            from attempt as e
            where
                (e.outcome = 'failed' or e.failure_code = 'attempts_exhausted')
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
            where
                i.job_id = a.job_id
                and i.queue = p_queue collate "C"
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

    -- By a statement of its own, which sees what happened between the look and the lock.
    select q.jobs into v_count from _requeue(v_job_ids, p_extra_attempts) as q;
    if v_count > 0 and _is_awaited(p_queue) then
        perform _wake(p_queue);
    end if;

    insert into operator_act (operator, act, arguments, job_count)
    values (
        _caller(), 'redrive_failed',
        jsonb_build_object(
            'queue', p_queue, 'since', p_since, 'before', p_before,
            'failure_code', p_failure_code, 'limit', p_limit,
            'extra_attempts', p_extra_attempts
        ),
        v_count
    );
    return v_count;
end;
$$;
comment on function
redrive_failed(text, timestamptz, timestamptz, text, integer, integer) is
'Queues up to p_limit failed jobs of a queue again, those first that failed first: '
'that failed since a time and before another or ever (NULL), with one failure code or '
'any (NULL), with that many more attempts each; answers how many; audited. Refuses a '
'queue that is not declared (LJ003), a malformed failure code (LJ005), a NULL since, '
'other than 1 to 10000 jobs or 1 to 100 attempts (LJ007).';
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
    execute format(
        'grant select on error_code, explain_reason, health_finding, installed_version '
        'to %s',
        v_groups
    );
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

                ('observer operator', 'inspect_attempts(uuid)'),
                ('observer operator', 'inspect_queues()'),
                ('observer operator', 'inspect_workers()'),
                (
                    'observer operator',
                    'inspect_failures('
                    'text, timestamptz, integer, text, timestamptz, uuid)'
                ),
                ('observer operator', 'inspect_acts(integer, bigint)'),
                ('observer operator', 'inspect_health()'),
                ('observer operator', 'explain_job(uuid)'),

                ('operator', 'redrive(uuid, integer)'),
                (
                    'operator',
                    'redrive_failed('
                    'text, timestamptz, timestamptz, text, integer, integer)'
                ),
                ('operator', 'purge(timestamptz, integer)'),
                ('operator', 'enforce_retention(integer)'),
                ('operator', 'retire_expired(integer)')
        ) as g (kinds, name)
        cross join unnest(string_to_array(g.kinds, ' ')) as r (kind)
    loop
        execute format(
            'grant execute on function %s to %s', v_object.name, v_object.role
        );
    end loop;
end $$;
-- What the Instance is made of, for inspect_health to compare with. Grants to others
-- than its own groups are never part of it.
delete from installed_object;
insert into installed_object (kind, name, digest)
select o.kind, o.name, o.digest
from _objects() as o
where
    o.kind <> 'grant'
    or substring(o.name from ' to (.*)$') in (
        select left(pg_get_userbyid(n.nspowner), -6) || '_' || g.kind
        from pg_namespace as n
        cross join unnest(
            array['producer', 'worker', 'observer', 'operator']
        ) as g (kind)
        where n.nspname = current_schema()
    );
