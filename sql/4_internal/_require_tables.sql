create or replace function _require_tables()
returns void
language plpgsql stable as $$
declare
    v_lost record;
begin
    select t.* into v_lost from _catalogue_lost_table() as t;
    if found then
        raise exception using errcode = 'LJ008',
            message = concat_ws(' ', v_lost.subject, v_lost.detail),
            hint    = 'Somebody changed the Instance by hand: run lenso-jobs check.';
    end if;
end;
$$;
comment on function _require_tables() is
'Refuses to read an Instance of which a table is missing or lost (LJ008).';
