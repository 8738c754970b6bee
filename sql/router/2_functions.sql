-- Each function of the Instance, run where its job is. Names, arguments and results are
-- those of the Instance. A test compares them.
--
--   key      on the shard of the key
--   job      on one shard after the other, until one has the job
--   limit    on one shard after the other, until the limit is reached
--   any      on all shards, one after the other; returns whether one returned true
--   newest   on all shards at once: the newest rows
--   sum      on all shards; the file 3_merged.sql has the function
--   refuse   not at all
--
-- If a shard fails, the next ones are still called.
--
-- _shard_NAME is a function of PL/Proxy. It runs on the given shards, one transaction
-- each, and returns the number of the shard with each row.
do $do$
declare
    v_schema text := current_schema();
    v_call   record;
    v_begin  text := $$
declare
    v_state   text;
    v_message text;
    v_detail  text;
    v_hint    text;
    v_shard   integer;
    v_any     boolean;
    v_done    integer;
    v_left    integer;
begin
$$;
    v_get    text := $$
        get stacked diagnostics v_state = returned_sqlstate,
            v_message = message_text, v_detail = pg_exception_detail,
            v_hint = pg_exception_hint;
$$;
    v_end    text;
    v_body   text;
begin
    v_end := $$
exception when others then $$ || v_get || $$
    perform _shard_refused(v_state, v_message, v_detail, v_hint);
end;
$$;
    for v_call in
        select c.name, c.arguments, c.result, c.route,
            c.result like 'setof %' as is_set,
            substring(c.result from '[^ ]+$') as item,
            coalesce(n.given, '') as given
        from (
            values
                ('enqueue',
                'p_queue text, p_kind text, p_payload jsonb, p_idempotency_key text, '
                'p_available_at timestamptz default null, '
                'p_max_attempts integer default 3', 'enqueued_job', 'key'),
                ('inspect_key',
                'p_idempotency_key text, p_producer text default null',
                'inspected_job', 'key'),

                ('inspect', 'p_job_id uuid', 'inspected_job', 'job'),
                ('inspect_attempts', 'p_job_id uuid', 'setof inspected_attempt', 'job'),
                ('redrive', 'p_job_id uuid, p_extra_attempts integer default 1',
                'failed_job', 'job'),
                ('erase', 'p_job_id uuid', 'boolean', 'job'),

                ('redrive_failed',
                'p_queue text, p_since timestamptz, p_before timestamptz default null, '
                'p_failure_code text default null, p_limit integer default 100, '
                'p_extra_attempts integer default 1, p_over_seconds integer default 0, '
                'p_kind text default null', 'integer', 'limit'),
                ('purge', 'p_before timestamptz, p_limit integer default 1000',
                'integer', 'limit'),
                ('enforce_retention', 'p_limit integer default 1000',
                'integer', 'limit'),
                ('retire_expired', 'p_limit integer default 1000', 'integer', 'limit'),

                ('pause', 'p_queue text', 'boolean', 'any'),
                ('resume', 'p_queue text', 'boolean', 'any'),

                ('inspect_failures',
                'p_queue text default null, p_since timestamptz default null, '
                'p_limit integer default 100, p_failure_code text default null, '
                'p_before timestamptz default null, p_before_job_id uuid default null, '
                'p_kind text default null', 'setof inspected_failure',
                'newest ended_at'),
                ('inspect_jobs',
                'p_queue text, p_status text, p_kind text default null, '
                'p_limit integer default 100, p_before uuid default null',
                'setof inspected_job', 'sum'),

                ('explain_job', 'p_job_id uuid', 'explained_job', 'sum'),
                ('inspect_queues', '', 'setof inspected_queue', 'sum'),
                ('inspect_workers', '', 'setof inspected_worker', 'sum'),
                ('inspect_acts',
                'p_limit integer default 100, p_before bigint default null',
                'setof inspected_act', 'sum'),
                ('inspect_health', '', 'setof inspected_finding', 'sum'),

                ('claim', 'p_queue text, p_limit integer default 1', 'setof leased_job',
                'refuse'),
                ('renew', 'p_job_id uuid, p_lease_token text', 'timestamptz', 'refuse'),
                ('renew_many', 'p_job_ids uuid[], p_lease_tokens text[]',
                'setof renewed_item', 'refuse'),
                ('complete', 'p_job_id uuid, p_lease_token text', 'boolean', 'refuse'),
                ('complete_many', 'p_job_ids uuid[], p_lease_tokens text[]',
                'setof completed_item', 'refuse'),
                ('fail',
                'p_job_id uuid, p_lease_token text, p_failure_code text, '
                'p_retryable boolean, p_retry_after_seconds integer default null',
                'failed_job', 'refuse'),
                ('fail_many',
                'p_job_ids uuid[], p_lease_tokens text[], p_failure_codes text[], '
                'p_retryable boolean[], p_retry_after_seconds integer[] default null',
                'setof failed_item', 'refuse'),
                ('release',
                'p_job_id uuid, p_lease_token text, p_delay_seconds integer default 0',
                'failed_job', 'refuse'),
                ('release_many',
                'p_job_ids uuid[], p_lease_tokens text[], p_delays_seconds integer[]',
                'setof failed_item', 'refuse'),
                ('next_available_at', 'p_queue text', 'timestamptz', 'refuse'),
                ('wait_key', 'p_queue text', 'bigint', 'refuse')
        ) as c (name, arguments, result, route)
        cross join lateral (
            select string_agg(', ' || split_part(a.argument, ' ', 1), '' order by a.n)
            from unnest(string_to_array(nullif(c.arguments, ''), ', '))
                with ordinality as a (argument, n)
        ) as n (given)
    loop
        if v_call.route <> 'refuse' then
            execute format(
                $$
create or replace function _shard_%1$s(
    p_shards integer[]%2$s, out shard integer, out item %3$s
)
returns setof record
language plproxy as %4$L
                $$,
                v_call.name,
                regexp_replace(', ' || nullif(v_call.arguments, ''), ' default \w+', '', 'g'),
                v_call.item,
                format(
                    $$
    cluster %L;
    split p_shards;
    run on p_shards;
    select (p_shards)[1]::integer as shard, f as item from %I.%I(%s) as f;
                    $$,
                    v_schema || '_shards', v_schema, v_call.name, substr(v_call.given, 3)
                )
            );
            execute format('comment on function _shard_%s is %L', v_call.name, format(
                'Runs %s on shards.', v_call.name
            ));
        end if;
        continue when v_call.route = 'sum';

        v_body := case split_part(v_call.route, ' ', 1)
            when 'key' then $$
    return (
        select s.item
        from _shard_%1$s(array[_shard_of(p_idempotency_key)]%2$s) as s
    );$$
            when 'job' then $$
    foreach v_shard in array _shards() loop
        begin
            return %4$s;
        exception when others then
            -- A shard that cannot be asked may be the one that has the job.
            if v_state is null or v_state = 'LJ006' then$$ || v_get || $$
            end if;
        end;
    end loop;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);$$
            when 'limit' then $$
    v_left := p_limit;
    foreach v_shard in array _shards() loop
        begin
            v_done := (select s.item from _shard_%1$s(array[v_shard]%5$s) as s);
            v_left := v_left - v_done;
        exception when others then$$ || v_get || $$
        end;
        exit when v_left <= 0;
    end loop;
    if v_state is null then
        return p_limit - v_left;
    end if;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);$$
            when 'any' then $$
    v_any := false;
    foreach v_shard in array _shards() loop
        begin
            v_any := (
                select s.item or v_any
                from _shard_%1$s(array[v_shard]%2$s) as s
            );
        exception when others then$$ || v_get || $$
        end;
    end loop;
    if v_state is null then
        return v_any;
    end if;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);$$
            when 'newest' then $$
    return query
    select (s.item).*
    from _shard_%1$s(_shards()%2$s) as s
    order by (s.item).%3$I desc, (s.item).job_id desc
    limit greatest(p_limit, 1);$$
            when 'refuse' then $$
    raise exception using errcode = 'LJ008',
        message = '%1$s runs on a shard, and this is the router of a fleet',
        hint    = 'Connect workers to the shards: lenso-jobs work --fleet FILE.';$$
        end;
        v_body := format(
            v_body,
            v_call.name, v_call.given, substring(v_call.route from ' (.*)'),
            format(
                case
                    when v_call.is_set
                        then 'query select (s.item).* from _shard_%s(array[v_shard]%s) '
                        'as s; return'
                    else '(select s.item from _shard_%s(array[v_shard]%s) as s)'
                end,
                v_call.name, v_call.given
            ),
            replace(v_call.given, 'p_limit', 'v_left')
        );
        execute format(
            $$
create or replace function %1$s(%2$s)
returns %3$s
language plpgsql
set search_path from current
set client_min_messages = warning
%5$s
as %4$L
            $$,
            v_call.name, v_call.arguments, v_call.result,
            case
                when v_call.route = 'refuse' then E'\nbegin' || v_body || E'\nend;\n'
                else v_begin || v_body || v_end
            end,
            -- PL/Proxy sends a time as text.
            case when v_call.arguments ~ 'timestamptz' then 'set datestyle = iso' else '' end
        );
        execute format('comment on function %s is %L', v_call.name, format(
            'As %s of an Instance, %s.', v_call.name,
            case split_part(v_call.route, ' ', 1)
                when 'key' then 'on the shard of the key'
                when 'job' then 'on the shard that has the job'
                when 'limit' then 'on one shard after the other'
                when 'refuse' then 'which only a shard runs: it refuses (LJ008)'
                else 'on all shards'
            end
        ));
    end loop;
end $do$;
