create or replace function _claim_floor_of(p_floors regclass[], p_place integer)
returns regclass[] language sql stable as $$
    select case
        when has_sequence_privilege(p_floors[3 * p_place - 2], 'update')
            and has_sequence_privilege(p_floors[3 * p_place - 1], 'update')
            and has_sequence_privilege(p_floors[3 * p_place], 'update')
            then p_floors[3 * p_place - 2:3 * p_place]
    end
$$;
comment on function _claim_floor_of(regclass[], integer) is
'The three sequences of one queue''s claim floor; NULL where one was dropped or given '
'away: each scan is full then.';
