-- Tables may have any size, and statistics any age. These functions use indexes and
-- nested loops under all statistics and all settings of the session. The verbs for one
-- job pin less, in their own files: a setting costs half a microsecond.
do $$
declare
    v_function text;
    v_more     text;
begin
    for v_function, v_more in
        select p.oid::regprocedure::text,
            case
                when p.proname ~ '^(_lease_give_back|.*_many)$'
                    then 'set enable_tidscan = on'
                else 'set enable_sort = off set enable_incremental_sort = off'
            end
        from pg_proc as p
        join pg_namespace as n on n.oid = p.pronamespace
        where n.nspname = current_schema()
            and p.proname ~ (
                '^(_lease_give_back|(enqueue|renew|complete)_many|wait_key'
                '|inspect.*|explain_job|next_available_at'
                '|purge|enforce_retention|redrive|redrive_failed|pause|resume|erase)$'
            )
    loop
        execute format(
            'alter function %s'
            ' set plan_cache_mode = force_generic_plan set jit = off'
            ' set enable_seqscan = off set enable_bitmapscan = off'
            ' set enable_hashjoin = off set enable_mergejoin = off'
            ' set enable_nestloop = on set enable_indexscan = on %s',
            v_function, v_more
        );
    end loop;
end $$;
