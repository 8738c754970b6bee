create or replace function inspect_acts(
    p_limit integer default 100, p_before bigint default null
)
returns setof inspected_act
language plpgsql stable security definer
set search_path from current as $$
begin
    perform _require_tables();
    perform _require_range('limit', p_limit, 1, 10000);

    return query
    select o.operator_act_id, o.acted_at, o.operator::text, o.act::text, o.arguments,
        o.job_count, o.login::text
    from operator_act as o
    where o.operator_act_id < coalesce(p_before, 9223372036854775807)
    order by o.operator_act_id desc
    limit p_limit;
end;
$$;
comment on function inspect_acts(integer, bigint) is
'The audit: the last operator acts, newest first; the next page is asked for with '
'act_id of the last row. Refuses other than 1 to 10000 rows (LJ007).';
