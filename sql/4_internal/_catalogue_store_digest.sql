-- Called with true only where somebody knows that the objects are as the release has
-- them: set-up, upgrade and repair after their own check, and a migration by
-- 9_seal.sql.
create or replace function _catalogue_store_digest(p_is_sound boolean)
returns void language sql volatile as $$
    insert into installed_digest (digest)
    values (case when p_is_sound then _catalogue_digest() end)
    on conflict (is_only) do update
    set digest = excluded.digest, stored_at = excluded.stored_at, fingerprint = null;
    update installed_digest
    set fingerprint = _catalogue_fingerprint()
    where not exists (select from _health_part('objects'))
$$;
comment on function _catalogue_store_digest(boolean) is
'Stores the digest of the objects for inspect_health to compare with; NULL where they '
'may differ from the release. Stores the fingerprint where nothing at all is found.';
