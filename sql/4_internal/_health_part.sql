-- A DBA may hide a view of the catalogue, and a function of the Instance may be gone.
-- One part that fails must not hide what the others find.
create or replace function _health_part(p_part text)
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable as $$
begin
    case p_part
        when 'sessions' then return query select f.* from _health_sessions() as f;
        when 'objects' then
            return query select f.* from _health_objects(current_schema()::text) as f;
        when 'roles' then return query select f.* from _health_roles() as f;
        when 'settings' then return query select f.* from _health_settings() as f;
        when 'history' then return query select f.* from _health_history() as f;
        when 'queues' then return query select f.* from _health_queues() as f;
        when 'failures' then return query select f.* from _health_failures() as f;
        when 'rows' then return query select f.* from _health_rows() as f;
        when 'storage' then return query select f.* from _health_storage() as f;
        when 'server' then return query select f.* from _health_server() as f;
    end case;
exception
when undefined_table or undefined_column or undefined_function then
    return query
    select
        'object_changed', 'objects', null::timestamptz, 'cannot be read: ' || sqlerrm,
        'lenso-jobs check';
when others then
    return query
    select 'not_readable', p_part, null::timestamptz, 'cannot be read: ' || sqlerrm, null;
end;
$$;
comment on function _health_part(text) is
'What is wrong with one part of the Instance, for inspect_health; that it cannot be '
'read where that fails.';
