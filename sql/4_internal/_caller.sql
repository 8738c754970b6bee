-- current_user is the owner inside a definer function, and session_user ignores SET
-- ROLE. The role setting cannot be forged: setting it takes membership.
create or replace function _caller()
returns text
language sql stable parallel restricted as $$
    select coalesce(nullif(current_setting('role'), 'none'), session_user)::text
$$;
comment on function _caller() is
'The caller Instance: the role in force by SET ROLE, else the session''s own.';
