"""The fault: a notification that is too large.

A wake-up is one small message for a queue and a transaction, on a channel of at most 63
bytes.

A name of more than 48 bytes, or of other than a-z, 0-9 and _, is no name of an Instance.
"""

import json
from itertools import product

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from lenso_jobs.operator import setup

EMAIL, SLOW = ("jobs_email", "email"), ("jobs_email", "slow")


def test_the_largest_job_wakes_with_the_name_of_its_queue(
    client, waiting, heard, refused
):
    waiter, jobs = waiting("email"), client("accounts")
    largest = {"text": "x" * (262144 - len('{"text": ""}'))}

    jobs.enqueue("email", "k" * 256, largest, idempotency_key="i" * 256)
    of_the_largest = heard(waiter)
    with refused("LJ001"):
        jobs.enqueue("email", "k" * 200, {"text": "x" * 2**20}, idempotency_key="k")

    assert of_the_largest == [EMAIL]
    assert heard(waiter) == []


@pytest.mark.slow
def test_ten_thousand_jobs_of_one_transaction_send_one_message_a_queue(
    producer, waiting, heard, owner
):
    waiter = waiting("email", "slow")

    with producer.transaction():
        for batch in range(10):
            items = [
                {
                    "queue": ("email", "slow")[n % 2],
                    "kind": "send",
                    "payload": {},
                    "idempotency_key": f"{batch}.{n}",
                }
                for n in range(1000)
            ]
            producer.execute("select enqueue_many(%s)", (json.dumps(items),))

    assert sorted(heard(waiter)) == [EMAIL, SLOW]
    assert owner.value("select count(*) from live_job") == 10000


@pytest.mark.slow
def test_the_longest_names_wake_and_only_their_own(
    databases, instance_of, waiting, heard, connect, crews, hire, only_woken, until
):
    conninfo = databases()
    dbname = conninfo_to_dict(conninfo)["dbname"]
    _, other = names = ("s" * 47 + "a", "s" * 47 + "b")
    queues = ("Q" * 127 + "/", "Q" * 128)
    for name in names:
        setup(instance_of(name, queues=queues), conninfo)
    owner, producer = connect(dbname=dbname), connect("accounts", dbname=dbname)

    def enqueue(name, queue, count):
        producer.execute(
            f"select {name}.enqueue(%s, 'send', '{{}}', 'k' || random())"
            " from generate_series(1, %s)",
            (queue, count),
        )

    waiter, neighbour = (
        waiting(queues[0], dbname=dbname, options=f"-c search_path={name}")
        for name in names
    )
    keys = [
        session.value("select wait_key(%s)", queues[0])
        for session in (waiter, neighbour)
    ]
    for queue in queues:
        enqueue(other, queue, 1)
    told = heard(waiter), heard(neighbour)
    neighbour.execute("select pg_advisory_unlock_all()")
    enqueue(other, queues[0], 1)

    assert keys[0] != keys[1]
    assert told == ([], [(other, queues[0])])
    assert heard(waiter) == heard(neighbour) == []

    waiter.execute("select pg_advisory_unlock_all()")

    async def handler(crew, lease):
        pass

    source = make_conninfo(conninfo, user="email-worker")
    hired = [
        hire(crew, handler, source, schema=name, queue=queue)
        for name in names
        for crew, queue in zip(crews, queues, strict=True)
    ]
    only_woken(4, dbname=dbname)
    for count, (name, queue) in enumerate(product(names, queues), start=1):
        enqueue(name, queue, count)
    until(
        lambda: (
            not any(owner.value(f"select count(*) from {n}.live_job") for n in names)
        )
    )

    # The other had three jobs, in two queues, before.
    assert [each.stop().succeeded for each in hired] == [1, 2, 3 + 2, 4 + 1]
