-- Only what the verbs rest on, and only facts that are the same after a dump and
-- restore and on every supported version of PostgreSQL. A further table or plain index
-- of the DBA's is left out, as are comments, storage options and grants.
create or replace function _catalogue_digested(
    p_kind text, p_name text, p_facts jsonb, p_owner text
)
returns text language sql immutable as $$
    select case
        when case
            when p_kind in ('function', 'type', 'domain') then true
            when p_kind in ('schema', 'migration table') then false
            when p_kind = 'view' then p_name = any(array[
                'error_code', 'explain_reason', 'health_finding', 'installed_version'
            ])
            when p_kind = 'index' and not (
                (p_facts -> 'unique')::boolean and (p_facts -> 'valid')::boolean
            ) then false
            else coalesce(p_facts ->> 'of' = 'domain', false) or coalesce(
                p_facts ->> 'table', p_facts ->> 'on', p_facts ->> 'of', p_name
            ) = any(_catalogue_tables())
        end
            then concat_ws(
                ' ', p_kind, p_name, p_facts ->> 'owner' = p_owner,
                p_facts - array[
                    'owner', 'place', 'grants', 'type grants', 'comment', 'options',
                    'made', 'position', case p_kind when 'view' then 'definition' end
                ]
            )
    end
$$;
comment on function _catalogue_digested(text, text, jsonb, text) is
'What the digest is taken of, for one object of _catalogue_objects; NULL: it does not '
'count.';
