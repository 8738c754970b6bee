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
