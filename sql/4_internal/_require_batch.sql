create or replace function _require_batch(p_names text, variadic p_dimensions text[])
returns void
language plpgsql stable as $$
begin
    if (
        p_dimensions[1] collate "C" = all (p_dimensions)
        and p_dimensions[1] collate "C" ~ '^[[]1:([1-9][0-9]?[0-9]?|1000)[]]$'
    ) is not true then
        raise exception using errcode = 'LJ007',
            message = format('%s must be parallel lists of 1 to 1000 items', p_names);
    end if;
end;
$$;
comment on function _require_batch(text, text[]) is
'Refuses arrays of these dimensions unless they are parallel lists of 1 to 1000 items '
'(LJ007).';
