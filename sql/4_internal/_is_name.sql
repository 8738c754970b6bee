-- Texts are compared by their bytes whatever collation a caller's columns give them:
-- one that is not deterministic knows no patterns, two that differ no comparison.
create or replace function _is_name(p_text text, p_length integer)
returns boolean
language sql stable as $$
    select (
        length(p_text) <= p_length
        and p_text collate "C" ~ '^[A-Za-z0-9._:/-]+$'
    ) is true
$$;
comment on function _is_name(text, integer) is
'Whether the text is 1 to p_length characters of A-Z a-z 0-9 . _ : / - alone.';
