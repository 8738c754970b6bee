-- The rights of the effective role decide, so that a role that is a producer and a
-- worker sees what a worker sees. Asked only about another producer's job.
create or replace function _may_inspect(p_producer text)
returns boolean
language sql stable as $$
    select p_producer = _caller()
        or exists (
            select
            from (
                values ('claim(text, integer)'), ('inspect_attempts(uuid)')
            ) as f (signature)
            where has_function_privilege(
                to_regrole(quote_ident(_caller())),
                to_regprocedure(f.signature),
                'EXECUTE'
            )
        )
$$;
comment on function _may_inspect(text) is
'Whether the caller may see the jobs of a producer: its own, or all jobs if it is a '
'worker, an observer or an operator.';
