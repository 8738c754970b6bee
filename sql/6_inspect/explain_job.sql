create or replace function explain_job(p_job_id uuid)
returns explained_job
language plpgsql stable security definer
set search_path from current as $$
declare
    v_answer explained_job;
begin
    if p_job_id is null then
        raise exception using errcode = 'LJ006',
            message = 'no such job',
            hint    = 'job_id must not be NULL.';
    end if;
    v_answer.job_id := p_job_id;

    select 'instance_damaged', t.subject, concat_ws(' ', t.subject, t.detail),
        'lenso-jobs check'
    into v_answer.reason, v_answer.who, v_answer.detail, v_answer.remedy
    from _catalogue_lost_table() as t;
    if v_answer.reason is null then
        v_answer := _explain_lock(v_answer, null);
    end if;
    if v_answer.reason is null then
        begin
            v_answer := _explain_row(v_answer);
        exception when undefined_column or undefined_table or undefined_function then
            v_answer := _explain_damage(v_answer);
        end;
    end if;

    -- The view may be what is lost.
    if (
        select t.subject from _catalogue_lost_table() as t
    ) is distinct from 'view explain_reason' then
        select r.meaning, coalesce(v_answer.remedy, r.remedy)
        into v_answer.meaning, v_answer.remedy
        from explain_reason as r
        where r.reason = v_answer.reason;
    end if;
    return v_answer;
end;
$$;
comment on function explain_job(uuid) is
'Why a job is not being claimed: one reason of explain_reason, with its facts, what it '
'means and what to do. Changes and locks nothing. Refuses NULL (LJ006).';
