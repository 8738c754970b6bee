create or replace function _health_settings()
returns table (finding text, subject text, since timestamptz, detail text, remedy text)
language sql stable as $$
    select 'setting_harmful', s.place, null::timestamptz,
        format(
            'has %s = %s; open sessions keep it: have them reconnect', s.setting, s.value
        ), s.remedy
    from _session_settings() as s
    where s.is_harmful
$$;
comment on function _health_settings() is
'Settings that make the calls of declared callers fail, for inspect_health.';
