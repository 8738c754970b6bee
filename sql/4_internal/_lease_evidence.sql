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
