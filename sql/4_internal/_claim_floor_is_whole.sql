create or replace function _claim_floor_is_whole(p_floor regclass[])
returns boolean language sql stable as $$
    select count(*) = 3
    from pg_sequence as s
    where s.seqrelid = any (p_floor)
        and (s.seqincrement, s.seqmin, s.seqcache, s.seqcycle) = (1, 0, 1, false)
        and s.seqmax = 9223372036854775807
$$;
comment on function _claim_floor_is_whole(regclass[]) is
'Whether the three sequences of a queue''s claim floor are there and unaltered.';
