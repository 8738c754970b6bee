-- The sequences of a queue that is no longer declared stay, because a claim may be
-- about to read them. The next new queue takes them.
create or replace function _claim_floors_made()
returns void language plpgsql volatile security definer
set search_path from current as $$
declare
    v_queue text;
    v_names text[];
    v_name  text;
    v_role  text;
begin
    for v_queue in
        select q.queue
        from queue as q
        where not _claim_floor_is_whole(q.floor)
    loop
        for v_number in 1 .. 1000000 loop
            v_names := array[
                format('claim_floor_%s_at', v_number),
                format('claim_floor_%s_id', v_number),
                format('claim_floor_%s_scan', v_number)
            ];
            exit when not exists (
                select
                from queue as q
                cross join unnest(v_names) as n (name)
                where q.queue <> v_queue and to_regclass(n.name) = any (q.floor)
            );
        end loop;
        foreach v_name in array v_names loop
            if to_regclass(v_name) is null then
                execute format('create sequence %I minvalue 0', v_name);
            else
                execute format(
                    'alter sequence %I as bigint increment 1 minvalue 0 no maxvalue '
                    'start 0 restart 0 cache 1 no cycle', v_name
                );
            end if;
            -- What default privileges gave away.
            execute format('revoke all on sequence %I from public', v_name);
            for v_role in
                select r.rolname::text
                from pg_class as c
                cross join aclexplode(c.relacl) as a
                join pg_roles as r on r.oid = a.grantee
                where c.oid = to_regclass(v_name) and a.grantee <> c.relowner
            loop
                execute format('revoke all on sequence %I from %I', v_name, v_role);
            end loop;
        end loop;
        update queue as q set floor = v_names::regclass[] where q.queue = v_queue;
    end loop;
end;
$$;
comment on function _claim_floors_made() is
'Gives each queue that lacks them, or whose are altered, the sequences of its claim '
'floor: new ones, its own, or some that no queue has.';
