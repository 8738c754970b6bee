"""How an application enqueues, and how it works a job."""

from django.db import connection, transaction

from lenso_jobs import HeldLease
from lenso_jobs.contrib.django import jobs_on

jobs = jobs_on("jobs_email", caller="accounts")


@transaction.atomic
def place(number: int) -> None:
    # Save your rows here: they are committed together with the job.
    jobs.enqueue(
        "email", "receipt", {"order": number}, idempotency_key=f"receipt:{number}"
    )


def receipt(lease: HeldLease) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        lease.complete(jobs_on("jobs_email", caller="email-worker"))
    print("receipt", lease.payload["order"], flush=True)
