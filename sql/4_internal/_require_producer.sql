create or replace function _require_producer()
returns void
language plpgsql
stable
as $$
begin
    if not exists (
        select from instance as i where _caller() = any (i.producers)
    ) then
        raise exception using
            errcode = '42501',
            message = format('role %I is not a declared producer', _caller()),
            hint    = 'SET ROLE to a role that producer_instances names.';
    end if;
end;
$$;
comment on function _require_producer() is
'Refuses whoever is not a declared producer (42501).';
