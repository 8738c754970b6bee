create or replace function _health_objects(p_schema text)
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language plpgsql stable
set quote_all_identifiers = off
set enable_hashjoin = on
set enable_sort = on
as $$
begin
    return query
    select 'object_changed', 'queue ' || q.queue, null::timestamptz,
        'has a claim floor of which a sequence is missing or altered: its claims are '
        'slow, or fail', format('select %I._claim_floors_made()', p_schema)
    from queue as q
    where q.floor is not null and not _claim_floor_is_whole(q.floor);
    -- Where nobody has changed an object since, there is nothing to find.
    if p_schema = current_schema() and exists (
        select from installed_digest as d where d.fingerprint = _catalogue_fingerprint()
    ) then
        return;
    end if;

    return query
    with home as (
        select n.nspname::text as name, pg_get_userbyid(n.nspowner)::text as owner,
            left(pg_get_userbyid(n.nspowner), -5) as prefix
        from pg_namespace as n
        where n.nspname = p_schema
    ),
    object as materialized (
        select o.* from home as h cross join _catalogue_objects(h.name) as o
    ),
    -- A group whose role is missing may have been renamed: it keeps what it holds.
    due as (
        select coalesce(nullif(g.object, 'schema'), 'schema ' || h.name) as object,
            coalesce(substring(g.object from ' (.*)$'), 'the schema') as label,
            g.privilege, quote_ident(h.prefix || g.role_kind) as grantee,
            r.rolname is null as is_lost
        from home as h
        cross join _catalogue_grants() as g
        left join pg_roles as r on r.rolname = h.prefix || g.role_kind
    ),
    given as (
        select g.*, m[1] as grantee, m[2] as privilege, m[3] is not null as is_passable,
            format(' (%I)', o.facts ->> 'column') as of_column, o.kind = 'column' as is_column
        from home as h
        cross join object as o
        left join object as t
            on o.kind = 'column' and t.name = o.facts ->> 'table'
            and t.kind in ('table', 'view')
        cross join lateral (
            select o.kind || ' ' || o.name, o.facts ->> 'place', w.word,
                case
                    when o.kind = 'schema' then 'the schema'
                    when o.kind in ('type', 'domain') then 'type ' || o.name
                    else o.name
                end
            from jsonb_array_elements_text(o.facts -> 'grants') as w (word)
            union all
            select 'type ' || o.name, format('type %I.%I', h.name, o.name), w.word,
                'type ' || o.name
            from jsonb_array_elements_text(o.facts -> 'type grants') as w (word)
        ) as g (object, place, word, label)
        cross join regexp_match(g.word, '^(.*) ([A-Z]+)( with grant option)?$') as m
        -- What is not the owner's is another finding, and a DBA's own table is none.
        where coalesce(t.facts, o.facts) ->> 'owner' = h.owner
            and not starts_with(g.word, quote_ident(h.owner) || ' ')
            and (
                o.kind in ('schema', 'migration table', 'type', 'domain')
                or (o.kind = 'function' and o.name ~ '^(_|configure[(])')
                or (o.kind = 'sequence' and starts_with(o.name, 'claim_floor_'))
                or coalesce(o.facts ->> 'table', o.name) = any(_catalogue_tables())
                or format(
                    '%s %s', coalesce(t.kind, o.kind), coalesce(t.name, o.name)
                ) in (select l.object from due as l)
            )
    )
    select
        'object_changed', 'objects', null::timestamptz, 'differ from what was installed',
        'lenso-jobs check'
    where (
        select
            encode(
                sha256(convert_to(string_agg(d.text, ', ' order by d.text), 'UTF8')), 'hex'
            )
        from home as h
        cross join object as o
        cross join lateral (
            select _catalogue_digested(o.kind, o.name, o.facts, h.owner) collate "C"
        ) as d (text)
    ) is distinct from (select d.digest from installed_digest as d)
    union all
    select 'index_unusable', 'index ' || i.name, null,
        case
            when o.name is null then 'is missing'
            when not (o.facts -> 'valid')::boolean
                then 'is not valid: it is being built, or its building was cut off'
            else 'is not as it was installed'
        end, null
    from (
        values
            ('live_job_claimable_idx', 'live_job',
            'btree (queue, available_at, job_id) WHERE (queue IS NOT NULL)'),
            ('attempt_ended_at_idx', 'attempt',
            'btree (ended_at) WHERE (((outcome)::text = ANY (ARRAY[''succeeded''::text, '
            '''failed''::text])) OR (failure_code = ''attempts_exhausted''::text))'),
            ('attempt_failed_idx', 'attempt',
            'btree (ended_at, job_id) WHERE (((outcome)::text = ''failed''::text) OR '
            '(failure_code = ''attempts_exhausted''::text))'),
            ('attempt_failed_of_queue_idx', 'attempt',
            'btree (queue, ended_at, job_id) WHERE (((outcome)::text = ''failed''::text) '
            'OR (failure_code = ''attempts_exhausted''::text))')
    ) as i (name, of_table, definition)
    -- That of another table does not count, though it may be in the way.
    left join object as o
        on o.kind = 'index' and o.name = i.name and o.facts ->> 'of' = i.of_table
    where
        (
            (o.facts -> 'valid')::boolean
            and split_part(o.facts ->> 'definition', ' USING ', 2) = i.definition
        ) is not true
    union all
    select
        'grant_stray', format('%s on %s to %s', lower(g.privilege), g.label, g.grantee),
        null, 'is not part of the Instance',
        format(
            'revoke %s%s%s on %s from %s cascade',
            case when g.is_passable and d.object is not null then 'grant option for ' end,
            lower(g.privilege), case when g.is_column then g.of_column end, g.place,
            g.grantee
        )
    from given as g
    left join due as d
        on (d.object, d.privilege, d.grantee) = (g.object, g.privilege, g.grantee)
    where (d.object is null or g.is_passable)
        and not exists (
            select from due as l
            where l.is_lost and (l.object, l.privilege) = (g.object, g.privilege)
        )
    union all
    -- Of a role that is missing _health_roles says so.
    select 'grant_missing', format('%s on %s to %s', lower(d.privilege), d.label, d.grantee),
        null,
        case when o.name is null then 'is missing with its object' else 'is missing' end,
        format('grant %s on ', lower(d.privilege)) || (o.facts ->> 'place')
        || ' to ' || d.grantee
    from due as d
    left join object as o on o.kind || ' ' || o.name = d.object
    where not d.is_lost
        and (
            o.facts -> 'grants' ?| array[
                d.grantee || ' ' || d.privilege,
                d.grantee || ' ' || d.privilege || ' with grant option'
            ]
        ) is not true;
end;
$$;
comment on function _health_objects(text) is
'Objects that differ from what was installed, unusable indexes, and rights that '
'_catalogue_grants does not list or that a group does not have, for inspect_health and '
'check.';
