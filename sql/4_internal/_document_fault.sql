-- Bounds are the table's constraints to keep; this proves what a cast would bend into
-- them, a fraction or a number in quotes, and that the lists are lists of names.
create or replace function _document_fault(p_document jsonb, p_schema text)
returns text
language plpgsql
stable
as $$
declare
    v_field text;
begin
    if (jsonb_typeof(p_document) = 'object') is not true then
        return 'the document must be a JSON object';
    end if;
    select k.name into v_field
    from jsonb_object_keys(p_document) as k (name)
    where k.name not in (
        'schema', 'database_url_secret', 'lease_seconds', 'retry_base_seconds',
        'retry_max_seconds', 'retry_jitter', 'notify', 'retention_seconds',
        'role_prefix', 'queues', 'producer_instances', 'worker_instances',
        'observer_instances'
    );
    if found then
        return format('%I is not a field of the configuration', v_field);
    end if;
    if (p_document ->> 'schema' = p_schema) is not true then
        return format('the document''s schema is not %I', p_schema);
    end if;

    for v_field in
        select k.name
        from unnest(array[
            'lease_seconds', 'retry_base_seconds', 'retry_max_seconds',
            'retention_seconds'
        ]) as k (name)
        where
            k.name <> 'retention_seconds'
            or coalesce(p_document -> k.name, 'null') <> 'null'
    loop
        if jsonb_typeof(p_document -> v_field) is distinct from 'number'
            or (p_document -> v_field)::numeric % 1 <> 0 then
            return format('%s must be a whole number', v_field);
        end if;
    end loop;

    if jsonb_typeof(p_document -> 'retry_jitter') <> 'number' then
        return 'retry_jitter must be a number';
    end if;
    if jsonb_typeof(p_document -> 'notify') <> 'boolean' then
        return 'notify must be true or false';
    end if;

    foreach v_field in array array[
        'queues', 'producer_instances', 'worker_instances', 'observer_instances'
    ] loop
        if jsonb_typeof(p_document -> v_field) <> 'array'
            or jsonb_path_exists(
                p_document -> v_field, 'strict $[*] ? (@.type() != "string")'
            )
            or jsonb_array_length(p_document -> v_field) <> (
                select count(distinct e.value)
                from jsonb_array_elements(p_document -> v_field) as e
            ) then
            return format('%s must be a list of different names', v_field);
        end if;
        if coalesce(jsonb_array_length(p_document -> v_field), 0) = 0
            and v_field <> 'observer_instances' then
            return format('%s must name something', v_field);
        end if;
    end loop;
    return null;
end;
$$;
comment on function _document_fault(jsonb, text) is
'What is wrong with the form of a configuration document; NULL: nothing.';
