create or replace function _lease_is_broken(
    p_leased_at timestamptz, p_lease_expires_at timestamptz, p_lease_owner text,
    p_lease_token_hash bytea
)
returns boolean language sql immutable as $$
    select (p_leased_at is null) <> (p_lease_owner is null)
        or (p_lease_expires_at is null) <> (p_lease_owner is null)
        or (p_lease_token_hash is null) <> (p_lease_owner is null)
$$;
comment on function _lease_is_broken(timestamptz, timestamptz, text, bytea) is
'Whether a live row has half a lease: no worker can complete or renew it.';
