-- The caller puts the schema first in its search_path: names are then the same in two
-- schemas. Nothing here calls a function of this Instance, because check describes an
-- Instance that it does not trust by the query of a copy that it loaded beside it.
create or replace function _catalogue_objects(p_schema text)
returns table (kind text, name text, facts jsonb)
language plpgsql stable
set quote_all_identifiers = off
set jit = off
set enable_seqscan = on
set enable_hashjoin = on
set enable_sort = on
as $$
begin
    return query
    with home as (select n.* from pg_namespace as n where n.nspname = p_schema),
    relation as (
        select c.*, c.relname ~ '^_?yoyo_' as is_yoyo,
            format('%I.%I', p_schema, c.relname) as place
        from pg_class as c
        join home as h on h.oid = c.relnamespace
    ),
    described (kind, name, place, acl, type_acl, facts) as (
        select 'schema', h.nspname::text, format('schema %I', h.nspname),
            coalesce(h.nspacl, acldefault('n', h.nspowner)), null::aclitem[],
            jsonb_build_object('owner', pg_get_userbyid(h.nspowner))
        from home as h
        union all
        select 'function', p.oid::regprocedure::text,
            'routine ' || (pg_identify_object('pg_proc'::regclass, p.oid, 0)).identity,
            coalesce(p.proacl, acldefault('f', p.proowner)), null,
            jsonb_build_object(
                'definition',
                case when p.prokind in ('f', 'p') then pg_get_functiondef(p.oid) end,
                'signature', concat_ws(
                    ' ', pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)
                ),
                'owner', pg_get_userbyid(p.proowner),
                'comment', obj_description(p.oid, 'pg_proc')
            )
        from pg_proc as p
        join home as h on h.oid = p.pronamespace
        union all
        select
            case
                when r.is_yoyo then 'migration table' when r.relkind = 'v' then 'view'
                when r.relkind = 'S' then 'sequence' when r.relkind = 'c' then 'type'
                else 'table'
            end,
            r.relname,
            case r.relkind when 'S' then 'sequence ' else 'table ' end || r.place,
            case r.relkind
                when 'S' then coalesce(r.relacl, acldefault('s', r.relowner))
                when 'c' then null
                else coalesce(r.relacl, acldefault('r', r.relowner))
            end,
            coalesce(y.typacl, acldefault('T', y.typowner)),
            jsonb_build_object(
                'relkind', r.relkind, 'persistence', r.relpersistence,
                'owner', pg_get_userbyid(r.relowner), 'made', r.oid::bigint,
                'options', array(select unnest(r.reloptions) order by 1),
                'row security', concat(r.relrowsecurity, r.relforcerowsecurity),
                -- A table of a publication then refuses every UPDATE and DELETE.
                'replica identity', case
                    when r.relkind = 'r' and r.relreplident = 'n' then 'nothing'
                end,
                'columns', case when r.relkind = 'v' then a.list end,
                'table', s.refobjid::regclass,
                'definition', case r.relkind
                    when 'v' then pg_get_viewdef(r.oid) when 'c' then a.list
                    when 'S' then (
                        select
                            format(
                                'as %s increment %s minvalue %s maxvalue %s start %s '
                                'cache %s%s cycle', q.seqtypid::regtype, q.seqincrement,
                                q.seqmin, q.seqmax, q.seqstart, q.seqcache,
                                case when not q.seqcycle then ' no' end
                            )
                        from pg_sequence as q
                        where q.seqrelid = r.oid
                    )
                end,
                'comment', obj_description(r.oid, 'pg_class')
            )
        from relation as r
        left join pg_type as y on y.oid = r.reltype
        left join pg_depend as s
            on r.relkind = 'S' and s.deptype in ('a', 'i')
            and (s.classid, s.objid) = ('pg_class'::regclass, r.oid)
        cross join lateral (
            select
                string_agg(
                    format('%I %s', t.attname, format_type(t.atttypid, t.atttypmod)),
                    ', ' order by t.attnum
                ) as list
            from pg_attribute as t
            where r.relkind in ('v', 'c')
                and t.attrelid = r.oid and t.attnum > 0 and not t.attisdropped
        ) as a
        where r.relkind in ('r', 'v', 'S', 'c', 'm', 'p', 'f')
        union all
        select 'column', format('%I.%I', r.relname, t.attname), 'table ' || r.place,
            t.attacl, null,
            jsonb_build_object(
                'table', r.relname, 'column', t.attname, 'relkind', r.relkind,
                'position', t.attnum,
                'not null', t.attnotnull, 'identity', t.attidentity,
                'type', case
                    when r.relkind <> 'v' then concat_ws(
                        ' collate ', format_type(t.atttypid, t.atttypmod),
                        nullif(t.attcollation, y.typcollation)::regcollation
                    )
                end,
                'domain', case when y.typnamespace = r.relnamespace then y.typname end,
                'default', pg_get_expr(d.adbin, d.adrelid),
                'comment', col_description(r.oid, t.attnum)
            )
        from relation as r
        join pg_attribute as t on t.attrelid = r.oid
        join pg_type as y on y.oid = t.atttypid
        left join pg_attrdef as d on d.adrelid = t.attrelid and d.adnum = t.attnum
        where r.relkind in ('r', 'v', 'p', 'f') and not r.is_yoyo
            and t.attnum > 0 and not t.attisdropped
        union all
        -- From 18 on NOT NULL is a constraint; the column says it in every version.
        select 'constraint', format('%I.%I', coalesce(r.relname, t.typname), k.conname),
            null, null, null,
            jsonb_build_object(
                'of', case when r.oid is null then 'domain' else 'table' end,
                'on', coalesce(r.relname, t.typname), 'name', k.conname,
                'columns', array(
                    select format('%I.%I', r.relname, a.attname)
                    from pg_attribute as a
                    where a.attrelid = r.oid and a.attnum = any(k.conkey)
                    order by a.attnum
                ),
                'definition',
                regexp_replace(pg_get_constraintdef(k.oid), ' NOT VALID$', ''),
                'validated', k.convalidated
            )
        from pg_constraint as k
        join home as h on h.oid = k.connamespace
        left join relation as r on r.oid = k.conrelid
        left join pg_type as t on t.oid = k.contypid
        where k.contype <> 'n' and r.is_yoyo is not true
        union all
        select 'index', x.relname, null, null, null,
            jsonb_build_object(
                'of', r.relname, 'definition', pg_get_indexdef(x.oid),
                'unique', i.indisunique,
                'valid', i.indisvalid and i.indisready and i.indislive,
                'columns', array(
                    select format('%I.%I', r.relname, a.attname)
                    from pg_attribute as a
                    where a.attrelid = r.oid and a.attnum = any(i.indkey)
                    order by a.attnum
                ),
                'constraint',
                exists (select from pg_constraint as k where k.conindid = x.oid),
                'options', array(select unnest(x.reloptions) order by 1)
            )
        from relation as x
        join pg_index as i on i.indexrelid = x.oid
        join relation as r on r.oid = i.indrelid and not r.is_yoyo
        where not exists (
            select from pg_stat_progress_create_index as p
            where p.datname = current_database() and p.index_relid = x.oid
        )
        union all
        select o.kind, format('%I.%I', r.relname, o.name), null, null, null,
            jsonb_build_object(
                'of', r.relname, 'name', o.name,
                'definition', o.definition, 'enabled', o.enabled
            )
        from relation as r
        join (
            select 'trigger', g.tgrelid, g.tgname, pg_get_triggerdef(g.oid), g.tgenabled
            from pg_trigger as g
            where not g.tgisinternal
            union all
            select 'rule', w.ev_class, w.rulename, null, w.ev_enabled
            from pg_rewrite as w
            where w.rulename <> '_RETURN'
            union all
            select 'policy', y.polrelid, y.polname, null, null
            from pg_policy as y
        ) as o (kind, relation, name, definition, enabled) on o.relation = r.oid
        union all
        select case t.typtype when 'd' then 'domain' else 'type' end, t.typname,
            format('type %I.%I', p_schema, t.typname),
            coalesce(t.typacl, acldefault('T', t.typowner)), null,
            jsonb_build_object(
                'type', concat_ws(
                    ' ', format_type(t.typbasetype, t.typtypmod),
                    t.typcollation::regcollation
                ),
                'not null', t.typnotnull, 'owner', pg_get_userbyid(t.typowner),
                'comment', obj_description(t.oid, 'pg_type')
            )
        from pg_type as t
        join home as h on h.oid = t.typnamespace
        where t.typtype in ('d', 'e', 'r')
    )
    select d.kind, d.name,
        d.facts || jsonb_build_object(
            'place', replace(d.place, 'pg_catalog.', ''),
            'grants', coalesce(g.words, '{}'),
            'type grants', coalesce(g.type_words, '{}')
        )
    from described as d
    cross join lateral (
        select
            array_agg(w.word order by w.word collate "C") filter (where not w.of_type),
            array_agg(w.word order by w.word collate "C") filter (where w.of_type)
        from (
            select a.of_type, concat(
                case a.grantee
                    when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee))
                end,
                ' ', a.privilege_type,
                case when a.is_grantable then ' with grant option' end
            )
            from (
                select false, x.* from aclexplode(d.acl) as x
                union all
                select true, x.* from aclexplode(d.type_acl) as x
            ) as a (of_type, grantor, grantee, privilege_type, is_grantable)
        ) as w (of_type, word)
    ) as g (words, type_words);
end;
$$;
comment on function _catalogue_objects(text) is
'Every object of a schema, each with the facts that check compares: definition, owner, '
'grants, comment and so on.';
