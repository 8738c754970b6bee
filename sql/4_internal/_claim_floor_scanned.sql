-- One number holds both. Above its lowest 12 bits is the millisecond of the scan,
-- rounded down so that it is never in the future. The 12 bits are what the scan took,
-- in steps of 200 us, at most 0.6 s: 50 times as long is at most 30 s.
create or replace function _claim_floor_scanned(
    p_floor regclass[], p_at timestamptz, p_took interval
)
returns void language sql volatile as $$
    select setval(
        p_floor[3],
        (floor(date_part('epoch', p_at) * 1000)::bigint << 12)
        + least(3000, coalesce(
            (date_part('epoch', p_took) * 5000)::bigint,
            greatest(100, pg_sequence_last_value(p_floor[3]) & 4095)
        ))
    )
$$;
comment on function _claim_floor_scanned(regclass[], timestamptz, interval) is
'Records when a full scan was made and how long it took; NULL: it begins, and is taken '
'to last as long as the one before, or 20 ms.';
