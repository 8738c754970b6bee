create or replace function _callers_of(p_document jsonb)
returns table (caller text, is_producer boolean, is_worker boolean, is_observer boolean)
language sql
stable
as $$
    select
        c.name,
        coalesce(p_document -> 'producer_instances' ? c.name, false),
        coalesce(p_document -> 'worker_instances' ? c.name, false),
        coalesce(p_document -> 'observer_instances' ? c.name, false)
    from (
        select p.value
        from jsonb_array_elements_text(p_document -> 'producer_instances') as p
        union
        select w.value
        from jsonb_array_elements_text(p_document -> 'worker_instances') as w
        union
        select o.value
        from jsonb_array_elements_text(p_document -> 'observer_instances') as o
    ) as c (name)
$$;
comment on function _callers_of(jsonb) is
'The caller Instances that a configuration document declares, and what each may do.';
