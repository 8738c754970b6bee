create or replace function inspect(p_job_id uuid)
returns inspected_job
language plpgsql stable security definer
set search_path from current as $$
declare
    v_answer inspected_job;
begin
    select r.* into v_answer from _inspect_row(p_job_id) as r;
    if not found or not _may_inspect(v_answer.producer) then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance or producer.';
    end if;
    return v_answer;
exception when insufficient_privilege or undefined_table then
    perform _require_tables();
    raise;
end;
$$;
comment on function inspect(uuid) is
'The durable evidence of one job: identity, status, attempts, lease and retry state, '
'last failure code; never its payload or key. Changes nothing. The status is lost if '
'somebody deleted rows by hand. Refuses an unknown job, and to a producer the job of '
'another producer (LJ006).';
