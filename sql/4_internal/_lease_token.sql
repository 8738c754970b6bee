-- Two random UUIDs hold 244 random bits. One secret serves the jobs of one claim: no
-- token tells anything of it, or of another.
create or replace function _lease_token(p_secret bytea, p_job_id uuid)
returns text
language sql immutable as $$
    select 'job_lease_' || encode(sha256(p_secret || uuid_send(p_job_id)), 'hex')
$$;
comment on function _lease_token(bytea, uuid) is
'The lease token of a job under the secret that its claim has drawn.';
