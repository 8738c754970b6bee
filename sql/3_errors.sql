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
