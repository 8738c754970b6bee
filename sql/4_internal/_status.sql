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
