-- In the words of inspect_health. A finding that names one object comes first.
create or replace function _explain_damage(p_answer explained_job)
returns explained_job language plpgsql stable as $$
begin
    select 'instance_damaged', f.subject, concat(f.subject, ' ', f.detail),
        coalesce(f.remedy, h.remedy)
    into p_answer.reason, p_answer.who, p_answer.detail, p_answer.remedy
    from _health_part('objects') as f
    join health_finding as h on h.finding = f.finding
    where f.finding in ('object_changed', 'index_unusable')
        or (f.finding = 'grant_missing' and right(f.subject, 7) = '_worker')
    order by
        array_position(
            array['index_unusable', 'grant_missing', 'object_changed'], f.finding
        ), f.subject
    limit 1;
    return p_answer;
end;
$$;
comment on function _explain_damage(explained_job) is
'Adds what of the Instance''s objects is damaged; no reason while nothing is.';
