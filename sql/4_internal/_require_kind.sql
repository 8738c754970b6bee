create or replace function _require_kind(p_kind text)
returns void
language plpgsql stable as $$
begin
    if p_kind is not null and not _is_name(p_kind, 256) then
        raise exception using errcode = 'LJ007',
            message = 'kind must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -';
    end if;
end;
$$;
comment on function _require_kind(text) is
'Refuses a malformed kind of a search (LJ007); NULL is any.';
