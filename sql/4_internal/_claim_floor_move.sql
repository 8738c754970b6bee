-- The ids of jobs are ordered by time: their first 60 bits are enough to tell apart
-- jobs that fell due at one instant. Sessions may interleave these writes; that may
-- hide jobs of one instant until the next full scan. A place that another session has
-- set since is left alone: it may have found older jobs. The last 20 ms stay above the
-- floor: an enqueue takes its due time before it commits.
create or replace function _claim_floor_move(
    p_floor regclass[], p_was bigint, p_began timestamptz, p_is_full boolean,
    p_at timestamptz, p_id uuid
)
returns void language plpgsql volatile as $$
declare
    v_highest timestamptz := p_began - interval '20 milliseconds';
begin
    if p_is_full then
        perform _claim_floor_scanned(p_floor, p_began, clock_timestamp() - p_began);
    elsif pg_sequence_last_value(p_floor[1]) is distinct from p_was then
        return;
    end if;
    perform setval(
        p_floor[2],
        case when p_at <= v_highest
            then ('x' || left(replace(p_id::text, '-', ''), 15))::bit(60)::bigint
            else 0
        end
    );
    perform setval(
        p_floor[1], (date_part('epoch', least(p_at, v_highest)) * 1000000)::bigint
    );
end;
$$;
comment on function
_claim_floor_move(regclass[], bigint, timestamptz, boolean, timestamptz, uuid) is
'Lets later claims begin behind the due time and id at which a scan stopped; a NULL '
'due time says that it found the end. Records a full scan.';
