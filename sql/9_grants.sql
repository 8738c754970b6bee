-- Takes every right on the Instance's objects from everybody but the owner, then gives
-- what _catalogue_grants lists. The roles are found through the schema's owner, so that
-- no file names an Instance.
do $$
declare
    v_schema text := current_schema();
    v_owner  text := (
        select pg_get_userbyid(n.nspowner)
        from pg_namespace as n
        where n.nspname = v_schema
    );
    v_change text;
begin
    -- Names are compared with names that were quoted where they need it.
    perform set_config('quote_all_identifiers', 'off', true);

    for v_change in
        select distinct format('revoke all on %s from %s cascade', g.place, g.grantee)
        from _catalogue_objects(v_schema) as o
        cross join lateral (
            select o.facts ->> 'place', w.word
            from jsonb_array_elements_text(o.facts -> 'grants') as w (word)
            union all
            select format('type %I.%I', v_schema, o.name), w.word
            from jsonb_array_elements_text(o.facts -> 'type grants') as w (word)
        ) as r (place, word)
        cross join lateral (
            select r.place, substring(r.word from '^(.*) [A-Z]+(?: with grant option)?$')
        ) as g (place, grantee)
        where g.grantee <> quote_ident(v_owner)
    loop
        begin
            execute v_change;
        exception when insufficient_privilege then
            null;  -- the object belongs to another role, which check reports
        end;
    end loop;

    for v_change in
        select
            format(
                'grant %s on %s to %I', g.privilege, o.facts ->> 'place',
                left(v_owner, -5) || g.role_kind
            )
        from _catalogue_grants() as g
        join _catalogue_objects(v_schema) as o
            on g.object in (o.kind, o.kind || ' ' || o.name)
    loop
        execute v_change;
    end loop;
end $$;
