create or replace function _catalogue_tables()
returns text[] language sql immutable as $$
    select array[
        'instance', 'caller', 'queue', 'job', 'live_job', 'attempt', 'operator_act',
        'installed_digest'
    ]
$$;
comment on function _catalogue_tables() is 'The tables of an Instance.';
