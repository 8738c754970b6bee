-- Ten bytes of a number can be sixteen thousand decimal places of text. Numbers of 64
-- characters and more are counted up to where their text alone would be too much, each
-- written out by itself, so that neither memory nor time is theirs to choose.
create or replace function _has_too_many_digits(p_payload jsonb)
returns boolean
language plpgsql
immutable
as $$
begin
    return 4096 = (
        select count(*)
        from (
            select
            from jsonb_path_query(
                p_payload, 'strict $.** ? (@.type() == "number")'
            ) as n
            where length(n::text) >= 64
            limit 4096
        ) as long
    );
end;
$$;
comment on function _has_too_many_digits(jsonb) is
'Whether the long numbers of a payload are more than 262144 bytes as text.';
