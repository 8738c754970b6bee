-- Bounds are the table's constraints to keep; this proves what a cast would bend into
-- them, a fraction or a number in quotes, and that the lists are lists of names.
create or replace function _document_fault(p_document jsonb, p_schema text)
returns text
language sql stable as $$
    select case
        when (jsonb_typeof(p_document) = 'object') is not true
            then 'the document must be a JSON object'
        when (p_document ->> 'schema' = p_schema) is not true
            then format('the document''s schema is not %I', p_schema)
        else (
            select string_agg(format(f.fault, f.name), '; ' order by f.name)
            from (
                select coalesce(k.name, d.key) as name,
                    case
                        when k.name is null
                            then '%I is not a field of the configuration'
                        when k.form = 'whole' and (
                            jsonb_typeof(d.value) is distinct from 'number'
                            or d.value::numeric % 1 <> 0
                        )
                            then '%s must be a whole number'
                        when k.form = 'number' and jsonb_typeof(d.value) <> 'number'
                            then '%s must be a number'
                        when k.form = 'boolean' and jsonb_typeof(d.value) <> 'boolean'
                            then '%s must be true or false'
                        when k.form = 'names' and (
                            jsonb_typeof(d.value) <> 'array'
                            or jsonb_path_exists(
                                d.value, 'strict $[*] ? (@.type() != "string")'
                            )
                            or jsonb_array_length(d.value) <> (
                                select count(distinct e.value)
                                from jsonb_array_elements(d.value) as e
                            )
                        )
                            then '%s must be a list of different names'
                        when k.form = 'names' and k.name <> 'observer_instances'
                            and coalesce(jsonb_array_length(d.value), 0) = 0
                            then '%s must name something'
                    end as fault
                from (
                    values
                        ('schema', ''), ('database_url_secret', ''), ('role_prefix', ''),
                        ('lease_seconds', 'whole'), ('retry_base_seconds', 'whole'),
                        ('retry_max_seconds', 'whole'), ('retry_jitter', 'number'),
                        ('notify', 'boolean'), ('queues', 'names'),
                        ('producer_instances', 'names'), ('worker_instances', 'names'),
                        ('observer_instances', 'names'),
                        (
                            'retention_seconds',
                            case
                                when p_document -> 'retention_seconds' <> 'null'
                                    then 'whole'
                                else ''
                            end
                        )
                ) as k (name, form)
                full join jsonb_each(p_document) as d on d.key = k.name
            ) as f
            where f.fault is not null
        )
    end
$$;
comment on function _document_fault(jsonb, text) is
'What is wrong with the form of a configuration document; NULL: nothing.';
