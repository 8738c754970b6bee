create or replace function _claim_entries_read()
returns bigint language sql volatile as $$
    select pg_stat_get_xact_tuples_returned('live_job_claimable_idx'::regclass)
$$;
comment on function _claim_entries_read() is
'How many entries of the claimable index this transaction has read so far.';
