-- Asked before anything is read: what reads a table that is gone fails.
create or replace function _missing_table()
returns text
language sql
stable
as $$
    select t.name
    from unnest(array[
        'instance', 'caller', 'queue', 'job', 'live_job', 'attempt', 'operator_act',
        'installed_object'
    ]) as t (name)
    where to_regclass(t.name) is null
    limit 1
$$;
comment on function _missing_table() is
'One of the tables of the Instance that does not exist; NULL while all do.';
