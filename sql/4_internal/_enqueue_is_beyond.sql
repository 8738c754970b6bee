create or replace function _enqueue_is_beyond(p_payload jsonb)
returns boolean
language sql immutable as $$
    select jsonb_path_match(
        p_payload,
        'strict exists($.**{129}) || exists(
            $.** ? (@.type() == "number" && (@ > 1e308 || @ < -1e308))
        )'
    )
$$;
comment on function _enqueue_is_beyond(jsonb) is
'Whether a payload is nested more than 128 levels deep or holds a number beyond 1e308.';
