-- 48 bits of milliseconds, the version, 12 bits of the rest of the millisecond, and
-- the variant and random half of a version 4 UUID.
create or replace function _new_job_id(p_at timestamptz)
returns uuid
language sql
volatile
as $$
    select encode(
        int8send(
            (((date_part('epoch', p_at) * 1000000)::bigint / 1000) << 16)
            | (7 << 12)
            | ((date_part('epoch', p_at) * 1000000)::bigint % 1000 * 4096 / 1000)
        )
        || substr(uuid_send(gen_random_uuid()), 9),
        'hex'
    )::uuid
$$;
comment on function _new_job_id(timestamptz) is
'A UUID version 7 of the given instant: ids sort by it down to a microsecond.';
