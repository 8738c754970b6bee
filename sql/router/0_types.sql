-- Drops the types that another release has made otherwise, with the functions that use
-- them; what follows makes both anew. The types of this release are in a schema beside.
do $$
declare
    v_type text;
begin
    for v_type in
        select c.relname
        from pg_class as c
        join pg_attribute as a on a.attrelid = c.oid
        where c.relkind = 'c'
            and c.relnamespace
            in (current_schema()::regnamespace, '_lenso_jobs_types'::regnamespace)
        group by c.relname
        having count(distinct c.oid) = 2 and count(*) <> 2 * count(distinct (
            a.attnum, a.attname, format_type(a.atttypid, a.atttypmod)
        ))
    loop
        execute format('drop type %I cascade', v_type);
    end loop;
    drop schema _lenso_jobs_types cascade;
end $$;
