-- The exponent is clamped where base * 2^17 is above every permitted maximum, so the
-- product can neither overflow nor lose its bound.
create or replace function _retry_at(
    p_failed_at timestamptz,
    p_attempt integer,
    p_base_seconds integer,
    p_max_seconds integer,
    p_jitter double precision
)
returns timestamptz
language sql
volatile
as $$
    select p_failed_at + make_interval(
        secs => (1 - p_jitter * random()) * least(
            p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17),
            p_max_seconds
        )
    )
$$;
comment on function _retry_at(
    timestamptz, integer, integer, integer, double precision
) is
'When a failed attempt may be repeated: after base * 2^(attempt - 1) seconds, at most '
'max, less what jitter takes off.';
