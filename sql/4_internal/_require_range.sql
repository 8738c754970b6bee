create or replace function _require_range(
    p_name text, p_value integer, p_least integer, p_most integer
)
returns void
language plpgsql stable as $$
begin
    if (p_value between p_least and p_most) is not true then
        raise exception using errcode = 'LJ007',
            message = format('%s must be from %s to %s', p_name, p_least, p_most);
    end if;
end;
$$;
comment on function _require_range(text, integer, integer, integer) is
'Refuses a value that is NULL or out of its range (LJ007).';
