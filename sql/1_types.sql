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
