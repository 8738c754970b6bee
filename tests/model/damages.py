"""What a DBA may do to an Instance by hand, each as one statement or several."""

EDIT = (
    "do $$ begin execute replace(pg_get_functiondef('{}'::regprocedure), '{}', '{}');"
    " end $$"
)
IN_DATABASE = "alter database {{db}} set {}"

# What inspect_health must have a finding about, while nothing else is wrong.
SEEN = [
    # Functions.
    EDIT.format("_caller()", "coalesce", "greatest"),
    EDIT.format("claim(text, integer)", "for update", "for no key update"),
    EDIT.format("inspect_queues()", "begin", "begin perform 1;"),
    EDIT.format("_health_roles()", "is a member of", "is member of"),
    "drop function complete(uuid, text)",
    "drop function configure(jsonb, boolean)",
    "drop function _catalogue_objects(text)",
    "drop function _claim_due",
    "drop function redrive(uuid, integer)",
    "alter function fail(uuid, text, text, boolean, integer) owner to postgres",
    "alter function claim(text, integer) owner to stranger",
    "alter function claim(text, integer) stable",
    "alter function renew(uuid, text) reset all",
    "alter function inspect(uuid) security invoker",
    "alter function complete(uuid, text) strict",
    "alter function purge(timestamptz, integer) rename to purged",
    "alter function renew_many(uuid[], text[]) set schema public",
    "alter function enqueue_many(jsonb) set search_path = public",
    "revoke execute on function claim(text, integer) from {p}_worker",
    "revoke execute on all functions in schema jobs_email from {p}_observer",
    "grant execute on all functions in schema jobs_email to public",
    "grant execute on function _caller() to public",
    "grant execute on function purge(timestamptz, integer) to stranger with grant option",
    "grant execute on function claim(text, integer) to {p}_producer",
    "create function claim(text) returns void language sql as ''",
    "create procedure stray() language sql as ''",
    "create function stray(leased_job) returns text language sql as 'select null'",
    (
        "create function stray() returns trigger language plpgsql as 'begin end';"
        " create trigger stray before insert on job execute function stray()"
    ),
    "create aggregate stray (integer) (sfunc = int4pl, stype = integer)",
    (
        "drop function inspect(uuid); create function inspect(id uuid) returns text"
        " language sql as 'select null'"
    ),
    # Views.
    "drop view error_code",
    "drop view health_finding; create table health_finding (finding text)",
    (
        "drop view installed_version; create view installed_version as"
        " select 1 as version, 'x' as note"
    ),
    "alter view explain_reason rename to explain_reasons",
    "revoke select on error_code from {p}_producer",
    # Triggers, rules, policies.
    "drop trigger caller_is_published on caller",
    "alter table queue disable trigger queue_is_published",
    "alter table caller disable trigger all",
    "alter trigger queue_is_published on queue rename to published",
    (
        "create trigger stray before update on job for each row"
        " execute function suppress_redundant_updates_trigger()"
    ),
    "create rule stray as on delete to operator_act do instead nothing",
    "create rule stray as on insert to attempt do instead nothing",
    # Indexes.
    "drop index live_job_claimable_idx",
    "drop index attempt_failed_idx; drop index attempt_ended_at_idx",
    (
        "update pg_index set indisvalid = false"
        " where indexrelid = 'live_job_claimable_idx'::regclass"
    ),
    (
        "update pg_index set indisready = false, indisvalid = false"
        " where indexrelid = 'attempt_failed_idx'::regclass"
    ),
    "alter index live_job_claimable_idx rename to claimable",
    "drop index attempt_failed_idx; create index attempt_failed_idx on attempt (worker)",
    "create unique index stray_idx on live_job (job_id, attempt)",
    # Constraints.
    "alter table job drop constraint job_producer_idempotency_key_key",
    "alter table caller drop constraint caller_pkey",
    "alter table live_job drop constraint live_job_pkey",
    "alter table attempt rename constraint attempt_pkey to attempt_key",
    (
        "alter table instance drop constraint instance_lease_seconds_in_range,"
        " add constraint instance_lease_seconds_in_range"
        " check (lease_seconds between 1 and 3600) not valid"
    ),
    "alter table job add constraint stray check (kind <> 'x')",
    "alter domain instant drop constraint instant_is_finite",
    (
        "alter domain object_payload drop constraint object_payload_is_an_object,"
        " add constraint stray check (value is not null) not valid"
    ),
    # Columns and tables.
    "alter table job alter column queue drop not null",
    "alter table live_job alter column max_attempts type bigint",
    "alter table live_job drop column last_failure_code",
    "alter table queue add column note text",
    "alter table caller add column note text not null default '' check (note <> 'x')",
    "alter table job alter column max_attempts type integer",
    "alter table job drop column available_at",
    "alter table attempt set unlogged",
    "alter table live_job replica identity nothing",
    (
        "alter table operator_act rename to acts; set role {p}_owner;"
        " create table operator_act (like acts including all); insert into operator_act"
        " overriding system value select * from acts; drop table acts; reset role"
    ),
    (
        "alter table live_job enable row level security;"
        " alter table live_job force row level security"
    ),
    (
        "alter table job enable row level security; alter table job force row level security;"
        " create policy stray on job using (kind = 'x')"
    ),
    "drop table queue",
    "drop table caller",
    "drop table installed_digest",
    "drop table operator_act",
    "grant select on job to public",
    "grant select, insert on all tables in schema jobs_email to stranger",
    "grant usage on sequence operator_act_operator_act_id_seq to public",
    "grant update (queue) on live_job to stranger with grant option",
    "grant usage on domain instant to stranger with grant option",
    "grant execute on function claim(text, integer) to {p}_worker with grant option",
    (
        "grant execute on function purge(timestamptz, integer) to stranger with grant"
        " option; set role stranger; grant execute on function purge(timestamptz,"
        " integer) to accounts; reset role"
    ),
    "grant select on _yoyo_log to stranger",
    "grant select (payload) on job to {p}_observer",
    "grant all on live_job to stranger with grant option",
    "grant usage on type leased_job to public",
    "grant create on schema jobs_email to stranger",
    "grant usage on schema jobs_email to public",
    "revoke usage on schema jobs_email from {p}_worker",
    "revoke all on schema jobs_email from {p}_producer, {p}_observer, {p}_operator",
    "alter sequence operator_act_operator_act_id_seq rename to act_seq",
    "grant update on sequence claim_floor_1_at to stranger",
    "drop sequence claim_floor_1_at",
    "alter sequence claim_floor_1_id maxvalue 1000 cycle",
    "alter sequence operator_act_operator_act_id_seq increment 10 cache 5",
    # What is recorded.
    "set session_replication_role = replica; delete from instance",
    "drop table instance",
    "update instance set workers = '{{}}', queues = '{{email}}'",
    "delete from installed_digest",
    "update installed_digest set digest = 'x'",
    "select setval('operator_act_operator_act_id_seq', 1, false)",
    # Roles.
    "alter role {p}_worker rename to {p}_workers",
    "alter role {p}_owner rename to {p}_owners",
    "drop owned by {p}_observer; drop role {p}_observer",
    (
        "drop owned by {p}_operator; drop role {p}_operator;"
        " drop owned by {p}_producer; drop role {p}_producer"
    ),
    "alter role {worker} rename to {worker}_now",
    "drop role {producer}",
    "revoke {p}_worker from {worker}",
    "revoke {p}_producer from {producer}; revoke {p}_worker from {worker}",
    "grant {p}_producer to stranger",
    "grant {p}_owner to stranger",
    "grant {p}_worker to {producer} with admin option",
]
# What nothing is said of, or by check alone.
UNSEEN = [
    "create index stray_idx on job (kind)",
    "create table stray (n integer primary key)",
    "create materialized view stray as select 1 as n",
    (
        "create table stray (n serial primary key);"
        " create view stray_view as select n from stray"
    ),
    "create view stray as select max_attempts, last_failure_code from live_job",
    (
        "create or replace view error_code as select e.sqlstate, e.name, 'x'::text"
        " as meaning from (values ('42501'::text, 'unauthorized'::text))"
        " as e (sqlstate, name)"
    ),
    "comment on function claim(text, integer) is 'x'",
    "comment on table job is null",
    "comment on column job.kind is 'x'",
    "comment on type leased_job is 'x'",
    "alter function renew(uuid, text) cost 7",
    "alter table live_job set (fillfactor = 99)",
    "alter table live_job reset (autovacuum_vacuum_threshold, fillfactor)",
    "alter table job set (autovacuum_analyze_scale_factor = 0.5)",
    "alter index live_job_claimable_idx set (fillfactor = 50)",
    "alter table job enable row level security",
    "create policy stray on job",
    "alter table job owner to postgres",
    "alter table operator_act owner to stranger",
    "alter function purge(timestamptz, integer) owner to {p}_worker",
    "reassign owned by {p}_owner to stranger",
    "reassign owned by {p}_owner to postgres",
    "alter view error_code owner to postgres",
    "alter domain instant owner to postgres",
    "alter type leased_job owner to stranger",
    "alter table instance alter column notify set default false",
    "alter table operator_act alter column acted_at drop default",
    "create type stray as (n integer)",
    "create domain stray as text",
    "create type stray as enum ('a', 'b')",
    "alter type enqueued_item rename to enqueued",
    "alter domain asked_attempts rename to attempts",
    "create sequence stray",
    "alter sequence claim_floor_1_id owner to stranger",
    "alter sequence claim_floor_1_at rename to floor",
    "drop type failed_item cascade",
    "alter schema jobs_email owner to postgres",
    "update instance set lease_seconds = 31, retry_jitter = 0.5",
    "update instance set retention_seconds = 5000000, notify = false",
    "insert into queue values ('stray')",
    "delete from queue",
    "delete from queue where queue = 'slow'",
    "update caller set is_worker = not is_worker, is_producer = true",
    "delete from caller",
    "insert into caller values ('stranger', true, true, true)",
    "delete from _yoyo_migration",
    "drop table _yoyo_log, yoyo_lock",
    "drop table _yoyo_migration",
    "insert into yoyo_lock (locked, ctime, pid) values (1, localtimestamp, 7)",
    "alter table _yoyo_log owner to postgres",
    "alter role {p}_producer login",
    "alter role {p}_worker superuser",
    "alter role {p}_owner bypassrls createdb",
    "alter role {p}_owner superuser login",
    "alter role {worker} superuser",
    "alter role {worker} noinherit",
    "grant {p}_owner to {worker}",
    "grant {p}_operator to {producer} with admin option",
    "grant {p}_owner to {p}_worker",
    "grant {p}_worker to {p}_producer",
    "grant pg_read_all_data to {observer}",
    "alter default privileges for role {p}_owner grant select on tables to public",
    "alter default privileges for role {p}_owner grant usage on schemas to stranger",
    "alter default privileges for role {p}_owner grant usage on types to stranger",
    "alter default privileges for role {p}_owner grant all on sequences to stranger",
    (
        "alter default privileges for role {p}_owner grant execute on functions to"
        " stranger with grant option; drop function inspect(uuid)"
    ),
    (
        "alter default privileges for role {p}_owner in schema jobs_email"
        " grant all on functions to stranger"
    ),
    "alter default privileges for role {p}_owner revoke execute on functions from public",
    "alter default privileges for role {p}_owner revoke all on tables from {p}_owner",
    IN_DATABASE.format("default_transaction_read_only = on"),
    "alter role {worker} set default_transaction_read_only = on",
    "alter role {producer} in database {db} set default_transaction_read_only = on",
    IN_DATABASE.format("default_transaction_isolation = 'serializable'"),
    IN_DATABASE.format("search_path = 'nowhere'"),
    IN_DATABASE.format("quote_all_identifiers = on"),
    IN_DATABASE.format("standard_conforming_strings = off"),
    IN_DATABASE.format("bytea_output = 'escape'"),
    IN_DATABASE.format("DateStyle = 'German, DMY'"),
    IN_DATABASE.format("check_function_bodies = off"),
    IN_DATABASE.format("row_security = off"),
    IN_DATABASE.format("extra_float_digits = -3"),
    IN_DATABASE.format("client_min_messages = 'error'"),
]
# What a person has to decide on, because rows are in the way.
BY_HAND = [
    (
        f"alter table {table} rename to {table}_old; create table {table} (like {table}_old including all);"
        f" alter table {table} owner to {{p}}_owner; revoke all on type {table} from public"
    )
    for table in ("live_job", "job", "attempt", "operator_act", "queue", "instance")
]
