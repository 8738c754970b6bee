-- Functions of the router that need more than one shard's answer.
do $do$
begin
    execute format(
        $$
create or replace function _shard_enqueue_many(
    p_shards integer[], p_jobs jsonb[], out shard integer, out item enqueued_item
)
returns setof record
language plproxy as %L
        $$,
        format(
            $$
    cluster %L;
    split p_shards, p_jobs;
    run on p_shards;
    select (p_shards)[1]::integer as shard, f as item
    from %I.enqueue_many((p_jobs)[1]) as f;
            $$,
            current_schema() || '_shards', current_schema()
        )
    );
end $do$;
comment on function _shard_enqueue_many(integer[], jsonb[]) is
'Runs enqueue_many on shards, each with its own jobs.';

create or replace function enqueue_many(p_jobs jsonb)
returns setof enqueued_item
language plpgsql
set search_path from current
set client_min_messages = warning
as $$
declare
    v_whole     boolean := true;
    v_shards    integer[];
    v_jobs      jsonb[];
    v_positions jsonb;
    v_state     text;
    v_message   text;
    v_detail    text;
    v_hint      text;
begin
    if jsonb_typeof(p_jobs) = 'array' then
        v_whole := jsonb_array_length(p_jobs) not between 1 and 1000
            or pg_column_size(
                case
                    when pg_column_compression(p_jobs) is null then p_jobs
                    else p_jobs || '[]'
                end
            ) > 16777216;
    end if;
    if v_whole then
        -- A shard says what is wrong with it.
        v_shards := array[0];
        v_jobs := array[p_jobs];
    else
        select array_agg(d.shard), array_agg(d.jobs), jsonb_object_agg(d.shard, d.positions)
        into v_shards, v_jobs, v_positions
        from (
            select i.shard, jsonb_agg(i.job order by i.n) as jobs,
                jsonb_agg(i.n order by i.n) as positions
            from (
                select _shard_of(a.job ->> 'idempotency_key') as shard, a.job, a.n
                from jsonb_array_elements(p_jobs) with ordinality as a (job, n)
            ) as i
            group by i.shard
        ) as d;
    end if;

    return query
    select r.position, r.job_id, r.outcome
    from (
        select (v_positions -> s.shard::text ->> (s.item).position - 1)::integer
            as position,
            (s.item).job_id, (s.item).outcome
        from _shard_enqueue_many(v_shards, v_jobs) as s
    ) as r
    order by r.position;
exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text,
        v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);
end;
$$;
comment on function enqueue_many(jsonb) is
'As enqueue_many of an Instance, each item on the shard of its key, one transaction a '
'shard. After an error some shards may have their items: repeat the call unchanged.';

create or replace function explain_job(p_job_id uuid)
returns explained_job
language plpgsql
set search_path from current
set client_min_messages = warning
as $$
declare
    v_answer  explained_job;
    v_best    explained_job;
    v_rank    integer;
    v_highest integer := 0;
    v_shard   integer;
    v_state   text;
    v_message text;
    v_detail  text;
    v_hint    text;
begin
    foreach v_shard in array _shards() loop
        begin
            select (s.item).* into v_answer
            from _shard_explain_job(array[v_shard], p_job_id) as s;
            -- A shard whose tables are locked cannot tell whether it has the job.
            v_rank := case
                when v_answer.queue is not null then 4
                when v_answer.reason <> 'purged_or_unknown' then 3
                when v_answer.until is not null then 2
                else 1
            end;
            if v_rank > v_highest then
                v_best := v_answer;
                v_highest := v_rank;
            end if;
            exit when v_rank = 4;
        exception when others then
            get stacked diagnostics v_state = returned_sqlstate,
                v_message = message_text, v_detail = pg_exception_detail,
                v_hint = pg_exception_hint;
        end;
    end loop;
    if v_state is not null and v_highest < 4 then
        perform _shard_refused(v_state, v_message, v_detail, v_hint);
    end if;
    return v_best;
end;
$$;
comment on function explain_job(uuid) is
'As explain_job of an Instance, of the shard that has the job.';

create or replace function inspect_jobs(
    p_queue text, p_status text, p_kind text default null,
    p_limit integer default 100, p_before uuid default null
)
returns setof inspected_job
language plpgsql
set search_path from current
set client_min_messages = warning
as $$
declare
    v_jobs    inspected_job[];
    v_cut     uuid;
    v_count   integer;
    v_mark    inspected_job;
    v_state   text;
    v_message text;
    v_detail  text;
    v_hint    text;
begin
    select array_agg(s.item),
        max((s.item).job_id::text) filter (where (s.item).status is null)
    into v_jobs, v_cut
    from _shard_inspect_jobs(
        _shards(), p_queue, p_status, p_kind, p_limit, p_before
    ) as s;

    -- A shard that was cut short may have jobs that are older than its last row.
    return query
    select j.*
    from unnest(v_jobs) as j
    where j.status is not null and (v_cut is null or j.job_id >= v_cut)
    order by j.job_id desc
    limit p_limit;
    get diagnostics v_count = row_count;
    if v_count < p_limit and v_cut is not null then
        v_mark.job_id := v_cut;
        return next v_mark;
    end if;
exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text,
        v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);
end;
$$;
comment on function inspect_jobs(text, text, text, integer, uuid) is
'As inspect_jobs of an Instance, of all shards.';

create or replace function inspect_queues()
returns setof inspected_queue
language plpgsql
set search_path from current
set client_min_messages = warning
as $$
declare
    v_state   text;
    v_message text;
    v_detail  text;
    v_hint    text;
begin
    return query
    with shard as materialized (
        select (s.item).* from _shard_inspect_queues(_shards()) as s
    ),
    codes as (
        select c.queue, jsonb_object_agg(c.code, c.number) as numbers
        from (
            select s.queue, e.key as code, sum(e.value::bigint)::bigint as number
            from shard as s
            cross join jsonb_each_text(s.failure_codes) as e
            group by s.queue, e.key
        ) as c
        group by c.queue
    )
    select s.queue, bool_or(s.is_declared), bool_or(s.is_estimate),
        sum(s.ready)::bigint, sum(s.scheduled)::bigint, sum(s.retry_waiting)::bigint,
        sum(s.running)::bigint, sum(s.expired)::bigint,
        max(s.oldest_ready_age), min(s.oldest_lapse_at),
        min(s.next_due_at), max(s.last_claimed_at), max(s.counted_since),
        sum(s.succeeded)::bigint, sum(s.failed)::bigint,
        coalesce((select c.numbers from codes as c where c.queue = s.queue), '{}'),
        sum(s.workers_waiting)::integer, sum(s.broken)::bigint,
        min(s.oldest_leased_at), min(s.paused_at)
    from shard as s
    group by s.queue
    order by s.queue collate "C";
exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text,
        v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);
end;
$$;
comment on function inspect_queues() is
'As inspect_queues of an Instance, the numbers of all shards added up. counted_since '
'is the latest of the shards. A queue counts as paused if it is paused on any shard.';

create or replace function inspect_workers()
returns setof inspected_worker
language plpgsql
set search_path from current
set client_min_messages = warning
as $$
declare
    v_state   text;
    v_message text;
    v_detail  text;
    v_hint    text;
begin
    return query
    with shard as materialized (
        select (s.item).* from _shard_inspect_workers(_shards()) as s
    )
    select s.worker, bool_or(s.is_declared), bool_or(s.is_estimate),
        sum(s.leases)::bigint, sum(s.expired)::bigint,
        min(s.oldest_leased_at), min(s.next_lease_expires_at), sum(s.sessions)::integer,
        (array_agg(s.oldest_job_id order by s.oldest_leased_at, s.oldest_job_id))[1],
        (array_agg(s.oldest_holder order by s.oldest_leased_at, s.oldest_job_id))[1]
    from shard as s
    group by s.worker
    order by s.worker collate "C";
exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text,
        v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);
end;
$$;
comment on function inspect_workers() is
'As inspect_workers of an Instance, the numbers of all shards added up.';

create or replace function inspect_acts(
    p_limit integer default 100, p_before bigint default null
)
returns setof inspected_act
language plpgsql
set search_path from current
set client_min_messages = warning
as $$
declare
    v_count   bigint := cardinality(_shards());
    v_state   text;
    v_message text;
    v_detail  text;
    v_hint    text;
begin
    -- Each shard has its own end of the page before, so that none leaves a gap.
    return query
    select (s.item).act_id * v_count + s.shard as act_id, (s.item).acted_at,
        (s.item).operator, (s.item).act,
        (s.item).arguments || jsonb_build_object('shard', s.shard),
        (s.item).job_count, (s.item).login
    from unnest(_shards()) as n (shard)
    cross join lateral _shard_inspect_acts(
        array[n.shard], p_limit, ceil((p_before::numeric - n.shard) / v_count)::bigint
    ) as s
    order by 1 desc
    limit greatest(p_limit, 1);
exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text,
        v_detail = pg_exception_detail, v_hint = pg_exception_hint;
    perform _shard_refused(v_state, v_message, v_detail, v_hint);
end;
$$;
comment on function inspect_acts(integer, bigint) is
'As inspect_acts of an Instance, of all shards. act_id is the shard''s own, times the '
'number of shards, plus the shard; the arguments name the shard, too.';

create or replace function inspect_health()
returns setof inspected_finding
language plpgsql
set search_path from current
set client_min_messages = warning
as $$
declare
    v_shard   integer;
    v_message text;
begin
    foreach v_shard in array _shards() loop
        begin
            return query
            select (s.item).severity, (s.item).finding,
                format('shard %s: %s', s.shard, (s.item).subject),
                (s.item).since, (s.item).detail, (s.item).remedy
            from _shard_inspect_health(array[v_shard]) as s;
        exception
            when insufficient_privilege then
                raise;
            when others then
                begin
                    perform _shard_refused(sqlstate, sqlerrm, '', '');
                exception when others then
                    v_message := sqlerrm;
                end;
                return query
                select f.severity, f.finding, format('shard %s', v_shard),
                    null::timestamptz, split_part(v_message, E'\n', 1), f.remedy
                from health_finding as f
                where f.finding = 'shard_unreachable';
        end;
    end loop;
end;
$$;
comment on function inspect_health() is
'As inspect_health of an Instance, of one shard after the other; the subject names the '
'shard. A shard that cannot be asked is the finding shard_unreachable.';
