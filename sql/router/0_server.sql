-- The foreign server, its user mappings and the callers, from the settings
--
--   lenso_jobs.document   the Instance's document
--   lenso_jobs.servers    a JSON array: the connection string of each shard, no role
--   lenso_jobs.passwords  a JSON object: the passwords of callers at the shards
--
-- Refuses before it changes anything. A user mapping without options logs in as the
-- current role, where pg_hba.conf of the shard lets the router in.
do $$
declare
    v_schema    text  := current_schema();
    v_name      text  := v_schema || '_shards';
    v_document  jsonb := current_setting('lenso_jobs.document')::jsonb;
    v_new       text[] := array(
        select jsonb_array_elements_text(current_setting('lenso_jobs.servers')::jsonb)
    );
    v_passwords jsonb := coalesce(
        nullif(current_setting('lenso_jobs.passwords', true), ''), '{}'
    )::jsonb;
    v_shards    integer := cardinality(v_new);
    v_server    pg_foreign_server;
    v_old       text[];
    v_before    text[] := '{}';
    v_message   text;
    v_caller    text;
    v_password  text;
    v_is_mapped boolean;
begin
    if to_regclass(format('%I.job', v_schema)) is not null then
        raise exception using errcode = 'LJ007',
            message = format(
                'schema %s holds an Instance, and cannot be the router of a fleet', v_schema
            ),
            hint    = 'Give the router a database of its own: database_url_secret.';
    end if;
    if not exists (select from pg_available_extensions where name = 'plproxy') then
        raise exception using errcode = 'LJ007',
            message = 'the server of the router has no extension plproxy',
            hint    = 'Install it there, for instance: apt-get install '
                'postgresql-15-plproxy.';
    end if;
    create extension if not exists plproxy schema pg_catalog;

    select s.* into v_server from pg_foreign_server as s where s.srvname = v_name;
    v_old := array(
        select o.option_value
        from pg_options_to_table(v_server.srvoptions) as o
        where o.option_name ~ '^p[0-9]+$'
        order by substr(o.option_name, 2)::integer
    );
    if v_server.oid is not null and cardinality(v_old) <> v_shards then
        raise exception using errcode = 'LJ007',
            message = format(
                'the router has %s shards, and the document names %s',
                cardinality(v_old), v_shards
            ),
            hint    = 'The number of shards cannot change: name as many as before.';
    end if;
    select format('shard %s is where shard %s was', n.place - 1, o.place - 1)
    into v_message
    from unnest(v_new) with ordinality as n (server, place)
    join unnest(v_old) with ordinality as o (server, place) on o.server = n.server
    where n.place <> o.place and n.server <> v_old[n.place]
    order by n.place
    limit 1;
    if v_message is not null then
        raise exception using errcode = 'LJ007', message = v_message,
            hint    = 'The order of the shards decides where a key is: keep the order.';
    end if;

    if v_server.oid is null then
        execute format(
            'create server %I foreign data wrapper plproxy options (%s)', v_name, (
                select string_agg(format('p%s %L', n.place - 1, n.server), ', ')
                from unnest(v_new) with ordinality as n (server, place)
            ) || ', connection_lifetime ''1800'''
        );
    elsif v_old <> v_new then
        execute format(
            'alter server %I options (%s)', v_name, (
                select string_agg(format('set p%s %L', n.place - 1, n.server), ', ')
                from unnest(v_new) with ordinality as n (server, place)
            )
        );
    end if;
    if not exists (
        select
        from pg_user_mappings as m
        where m.srvname = v_name and m.umuser = 0
    ) then
        execute format('create user mapping for public server %I', v_name);
    end if;

    -- A mapping is the document's if it is, or was, of a declared caller.
    if to_regclass(format('%I.caller', v_schema)) is not null then
        v_before := array(select c.caller from caller as c);
    end if;
    for v_caller, v_password, v_is_mapped in
        select c.caller, d.password, m.options is not null
        from (
            select unnest(v_before) as caller
            union
            select w.caller
            from unnest(array['producer', 'worker', 'observer']) as k (kind)
            cross join lateral jsonb_array_elements_text(
                coalesce(v_document -> (k.kind || '_instances'), '[]')
            ) as w (caller)
        ) as c
        cross join lateral (select v_passwords ->> c.caller) as d (password)
        left join pg_roles as r on r.rolname = c.caller
        left join lateral (
            select jsonb_object_agg(o.option_name, o.option_value) as options
            from pg_user_mappings as u
            cross join lateral pg_options_to_table(u.umoptions) as o
            where u.srvname = v_name and u.umuser = r.oid
        ) as m on true
        where m.options is distinct from case
            when d.password is not null
                then jsonb_build_object('user', c.caller, 'password', d.password)
        end
    loop
        begin
            if v_is_mapped then
                execute format('drop user mapping for %I server %I', v_caller, v_name);
            end if;
            if v_password is not null then
                execute format(
                    'create user mapping for %I server %I options (user %L, password %L)',
                    v_caller, v_name, v_caller, v_password
                );
            end if;
        exception when others then
            v_message := sqlerrm;
        end;
        -- Not within the handler: the context of the error shows the password.
        if v_message is not null then
            raise exception using errcode = 'LJ007', message = format(
                'the user mapping of %s cannot be made: %s', v_caller, v_message
            );
        end if;
    end loop;

    -- bootstrap.sql reads it, and revokes the rights of callers that it does not have.
    execute format(
        'create or replace view caller as '
        'select c.caller, c.is_producer, c.is_worker, c.is_observer '
        'from jsonb_to_recordset(%L::jsonb) as c '
        '(caller text, is_producer boolean, is_worker boolean, is_observer boolean)', (
            select jsonb_agg(c order by c.caller collate "C")
            from (
                select n.name as caller, bool_or(k.kind = 'producer') as is_producer,
                    bool_or(k.kind = 'worker') as is_worker,
                    bool_or(k.kind = 'observer') as is_observer
                from unnest(array['producer', 'worker', 'observer']) as k (kind)
                cross join lateral jsonb_array_elements_text(
                    coalesce(v_document -> (k.kind || '_instances'), '[]')
                ) as n (name)
                group by n.name
            ) as c
        )
    );
    comment on view caller is 'The callers that the document declares.';
    perform set_config('lenso_jobs.shards', v_shards::text, true);
end $$;
