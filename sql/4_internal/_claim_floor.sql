-- Anybody may write a setting, so its form is proved before any cast. Counts in the
-- pattern would cost ten times the rest of it.
create or replace function _claim_floor(p_setting text)
returns text[]
language sql
immutable
as $$
    select case
        when
            p_setting collate "C" ~ '^[0-9]+ [0-9a-f]+ [0-9]+ [0-9]+ [12]$'
            and length(split_part(p_setting, ' ', 1)) <= 16
            and length(split_part(p_setting, ' ', 2)) = 32
            and length(split_part(p_setting, ' ', 3)) <= 16
            and length(split_part(p_setting, ' ', 4)) <= 9
            then string_to_array(p_setting, ' ')
    end
$$;
comment on function _claim_floor(text) is
'What a claim left for the next one of its session: the due time of the last row it '
'handed out and its id, when the last walk from the start began and what it took, all '
'in microseconds, and 2 where the walk before was slow, too; NULL where it is anything '
'else.';
