create or replace function _document_stored()
returns jsonb
language sql stable as $$
    select jsonb_build_object(
        'lease_seconds', i.lease_seconds,
        'retry_base_seconds', i.retry_base_seconds,
        'retry_max_seconds', i.retry_max_seconds,
        'retry_jitter', i.retry_jitter,
        'notify', i.notify,
        'retention_seconds', i.retention_seconds,
        'queues', array(select q.queue from queue as q order by 1),
        'producer_instances', array(
            select c.caller from caller as c where c.is_producer order by 1
        ),
        'worker_instances', array(
            select c.caller from caller as c where c.is_worker order by 1
        ),
        'observer_instances', array(
            select c.caller from caller as c where c.is_observer order by 1
        )
    )
    from instance as i
$$;
comment on function _document_stored() is
'The fields of the configuration document that the Instance stores; NULL: no row of '
'policy.';
