create or replace function _require_policy()
returns void
language plpgsql stable as $$
begin
    if not exists (select from instance) then
        raise exception using errcode = 'LJ008',
            message = 'no policy is stored in this Instance',
            hint    = 'Run lenso-jobs configure.';
    end if;
end;
$$;
comment on function _require_policy() is
'Refuses an Instance whose policy row is missing (LJ008).';
