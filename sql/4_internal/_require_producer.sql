create or replace function _require_producer()
returns void
language plpgsql stable as $$
begin
    if not exists (select from instance as i where _caller() = any (i.producers)) then
        perform _require_policy();
        raise exception using errcode = '42501',
            message = format('role %I is not a declared producer', _caller()),
            hint    = 'SET ROLE to a role that producer_instances names.';
    end if;
end;
$$;
comment on function _require_producer() is
'Refuses a caller that is not a declared producer (42501), and every caller while no '
'policy is stored (LJ008).';
