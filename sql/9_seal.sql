-- A migration is applied by several tools, and none of them compares objects. What is
-- here now is taken for sound only if it was sound before the migration, which
-- 0_open.sql found. Else the digest is NULL, and inspect_health asks for lenso-jobs
-- check.
select _catalogue_store_digest(current_setting('lenso_jobs.was_sound', true) = 'true');
