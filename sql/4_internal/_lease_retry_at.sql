-- The exponent is clamped where base * 2^17 is above every permitted maximum, so the
-- product cannot overflow or lose its bound.
create or replace function _lease_retry_at(
    p_failed_at timestamptz, p_attempt integer, p_base_seconds integer,
    p_max_seconds integer, p_jitter double precision, p_after_seconds integer
)
returns timestamptz
language sql volatile as $$
    select p_failed_at + make_interval(
        secs => case
            when p_after_seconds is not null
                then least(p_after_seconds, p_max_seconds)::double precision
            else (1 - p_jitter * random()) * least(
                p_base_seconds * 2.0::double precision ^ least(p_attempt - 1, 17),
                p_max_seconds
            )
        end
    )
$$;
comment on function
_lease_retry_at(timestamptz, integer, integer, integer, double precision, integer) is
'When a failed attempt may be repeated: after the seconds that the worker names, else '
'after base * 2^(attempt - 1) less what jitter takes off; at most after max.';
