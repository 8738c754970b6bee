-- A scan of the index passes every entry that is dead or running, by the ten thousand
-- while a snapshot is held elsewhere. So the sessions share a place to begin at. It is
-- kept in three sequences a queue: a sequence is written in place, leaves no dead row
-- and knows no rollback. Not unlogged: PostgreSQL 18 cannot read one that was made
-- shortly before a standby was promoted.
--
-- It is a hint. Late commits, lapsed leases and claims that were rolled back lie below
-- it, and are found by the next full scan. A place or a scan in the future was written
-- by another clock and does not count.
create or replace function _claim_floor(
    p_floor         regclass[],
    p_now           timestamptz,
    out was         bigint,
    out at          timestamptz,
    out id          uuid,
    out scan_at     timestamptz,
    out may_scan_at timestamptz
)
language plpgsql volatile as $$
declare
    v_scanned bigint;
    v_pause   interval;
begin
    was := pg_sequence_last_value(p_floor[1]);
    if was is not null then
        v_scanned := coalesce(pg_sequence_last_value(p_floor[3]), 0);
        at := timestamptz 'epoch' + was * interval '1 microsecond';
        may_scan_at := timestamptz 'epoch' + (v_scanned >> 12) * interval '1 millisecond';
        if at <= p_now and may_scan_at <= p_now then
            id := (
                lpad(to_hex(coalesce(pg_sequence_last_value(p_floor[2]), 0)), 15, '0')
                || '00000000000000000'
            )::uuid;
            v_pause := least(3000, v_scanned & 4095) * interval '10 milliseconds';
            scan_at := may_scan_at + greatest(v_pause, interval '1 second');
            -- Below 2 ms a claim that finds nothing scans at once.
            if v_pause >= interval '100 milliseconds' then
                may_scan_at := may_scan_at + v_pause;
            end if;
            return;
        end if;
    end if;
    at := timestamptz '-infinity';
    id := uuid '00000000-0000-0000-0000-000000000000';
    may_scan_at := null;
end;
$$;
comment on function _claim_floor(regclass[], timestamptz) is
'Where a claim begins: behind this due time and id. Also when the next full scan is '
'due, and when one is allowed to a claim that finds nothing. Both are NULL if there is '
'no floor, and then each scan is full.';
