create or replace function _is_batch(p_dimensions integer[], p_lengths integer[])
returns boolean
language sql
stable
as $$
    select (
        1 = all (p_dimensions)
        and p_lengths[1] = all (p_lengths)
        and p_lengths[1] between 1 and 1000
    ) is true
$$;
comment on function _is_batch(integer[], integer[]) is
'Whether arrays of these dimensions and lengths are parallel lists of 1 to 1000 items.';
