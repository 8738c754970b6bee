create or replace function _policy_kept()
returns trigger
language plpgsql
set search_path from current as $$
begin
    raise exception using errcode = 'LJ007',
        message = 'the policy of a Jobs Instance cannot be deleted',
        hint    = 'lenso-jobs configure changes it; lenso-jobs uninstall removes the '
                  'whole Instance.';
end;
$$;
comment on function _policy_kept() is
'Refuses to delete the row without which no verb works.';

create or replace trigger instance_is_kept
before delete or truncate on instance
for each statement execute function _policy_kept();
