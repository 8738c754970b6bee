create or replace function _health_counted(p_number bigint, p_noun text)
returns text language sql immutable as $$
    select p_number || ' ' || p_noun || case when p_number <> 1 then 's' else '' end
$$;
comment on function _health_counted(bigint, text) is
'A number and its noun: 1 job, 2 jobs.';
