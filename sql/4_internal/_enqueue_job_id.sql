-- 48 bits of milliseconds, the version, 12 bits of the rest of the millisecond, and
-- the variant and random half of a version 4 UUID.
create or replace function _enqueue_job_id(
    p_at timestamptz, p_random uuid default gen_random_uuid()
)
returns uuid
language sql volatile as $$
    select encode(
        int8send(
            (((date_part('epoch', p_at) * 1000000)::bigint / 1000) << 16)
            | (7 << 12)
            | ((date_part('epoch', p_at) * 1000000)::bigint % 1000 * 4096 / 1000)
        )
        || substr(uuid_send(p_random), 9),
        'hex'
    )::uuid
$$;
comment on function _enqueue_job_id(timestamptz, uuid) is
'A UUID version 7 of the given instant: ids sort by it down to a microsecond. Its '
'random half is that of a version 4 UUID.';
