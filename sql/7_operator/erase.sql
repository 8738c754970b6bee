create or replace function erase(p_job_id uuid)
returns boolean
language plpgsql security definer
set search_path from current as $$
begin
    -- A redrive locks the row, too: the next statement sees what it did.
    perform from job as j where j.job_id = p_job_id for update;
    if not found then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'It may be purged, erased, or of another Instance.';
    end if;
    if exists (select from live_job as l where l.job_id = p_job_id) then
        raise exception using errcode = 'LJ007',
            message = 'the job has not ended',
            hint    = 'Only a job that succeeded or failed can be erased.';
    end if;

    delete from attempt as a where a.job_id = p_job_id;
    delete from job as j where j.job_id = p_job_id;
    insert into operator_act (operator, act, arguments, job_count)
    values (_caller(), 'erase', jsonb_build_object('job_id', p_job_id), 1);
    return true;
end;
$$;
comment on function erase(uuid) is
'Deletes one job that has ended, with its payload, evidence and key, as a request for '
'data protection asks for; audited by its id. Returns true. Refuses an unknown job '
'(LJ006), and one that is queued or running (LJ007).';
