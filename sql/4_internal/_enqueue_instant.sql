-- The form is proved before the cast, so that the cast can neither raise nor depend
-- on DateStyle or TimeZone: the letters go, because a session's own zone may be called
-- T or Z. No backslash: a caller may change what it means in a literal.
create or replace function _enqueue_instant(p_text text)
returns timestamptz
language sql stable as $$
    select case
        when p_text !~ (
            '^(?!0000)[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])'
            '[Tt]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,9})?'
            '([Zz]|[+-](0[0-9]|1[0-5]):[0-5][0-9])$'
        )
            then null
        when substr(p_text, 9, 2)::integer > extract(
            day from
            make_date(substr(p_text, 1, 4)::integer, substr(p_text, 6, 2)::integer, 1)
            + make_interval(months => 1, days => -1)
        )
            then null
        else replace(replace(upper(p_text), 'T', ' '), 'Z', '+00:00')::timestamptz
    end
$$;
comment on function _enqueue_instant(text) is
'An RFC 3339 timestamp with its offset as an instant; NULL where it is none.';
