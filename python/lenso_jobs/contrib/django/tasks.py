"""A backend for ``django.tasks`` of Django 6, or for the package ``django-tasks``.

::

    TASKS = {
        "default": {
            "BACKEND": "lenso_jobs.contrib.django.tasks.JobsBackend",
            "QUEUES": ["email"],
            "OPTIONS": {"schema": "jobs_shop", "caller": "accounts"},
        }
    }

Work the tasks with::

    manage.py lenso_work --config jobs.json --queue email \
        --handler lenso_jobs.contrib.django.tasks:run_task
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from lenso_jobs.contrib.django import jobs_on
from lenso_jobs.worker import Release

try:
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskResult, TaskResultStatus
    from django.tasks.signals import task_enqueued
except ImportError:
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskResult, TaskResultStatus
    from django_tasks.signals import task_enqueued

if TYPE_CHECKING:
    from lenso_jobs.worker import HeldLease

_OPTIONS = {"schema", "using", "caller", "max_attempts"}
_UNKNOWN_SECONDS = 60


class JobsBackend(BaseTaskBackend):
    """Enqueues tasks as jobs of an Instance.

    The job joins the transaction in progress; without one, it is committed at once. Its
    kind is the path of the task, its payload ``{"args": [], "kwargs": {}}``, its key is
    random. A task that raises is tried again, up to ``max_attempts`` times (3).

    What it cannot do:

    - Results are not stored, so ``get_result`` and ``refresh`` are not supported. The
      ``id`` of a result is the job's: look at it with ``lenso-jobs inspect``.
    - There are no priorities. Use a queue for each.
    - ``task_started`` and ``task_finished`` are not sent: a worker's observers have
      more to tell.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = False
    supports_priority = False

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        options = dict(self.options)
        if unknown := options.keys() - _OPTIONS or {"schema"} - options.keys():
            raise ImproperlyConfigured(
                f"TASKS[{alias!r}]: OPTIONS must have schema, and may have using, caller "
                f"and max_attempts; look at {', '.join(sorted(unknown))}"
            )
        self._using = options.get("using", DEFAULT_DB_ALIAS)
        self._max_attempts = options.get("max_attempts", 3)
        self._jobs = jobs_on(options["schema"], self._using, options.get("caller"))

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - of Django
        """Enqueue a job that runs a task."""
        self.validate_task(task)
        result = _result(task, self.alias, args, kwargs)
        # Not a savepoint: a refusal marks the whole transaction, as other errors do.
        with transaction.atomic(self._using, savepoint=False):
            job = self._jobs.enqueue(
                task.queue_name,
                task.module_path,
                {"args": result.args, "kwargs": result.kwargs},
                idempotency_key=f"task:{uuid4()}",
                available_at=task.run_after,
                max_attempts=self._max_attempts,
            )
        result = replace(result, id=str(job.job_id))
        task_enqueued.send(type(self), task_result=result)
        return result


def run_task(lease: HeldLease) -> None:
    """Run the task of a job: the handler for ``lenso_work``.

    A task that no installed application has is another release's: its job is released.
    """
    task = _task_of(lease.kind)
    if task is None:
        raise Release("unknown_kind", after=_UNKNOWN_SECONDS)
    args, kwargs = lease.payload["args"], lease.payload["kwargs"]
    if task.takes_context:
        now = timezone.now()
        result = replace(
            _result(task, task.backend, args, kwargs),
            id=str(lease.job_id),
            status=TaskResultStatus.RUNNING,
            started_at=now,
            last_attempted_at=now,
            worker_ids=[""] * lease.attempt,  # its length is the number of the attempt
        )
        args = [TaskContext(task_result=result), *args]
    task.call(*args, **kwargs)


def _task_of(path: str) -> Any:  # noqa: ANN401 - of Django
    # A producer chooses the path: nothing is imported but modules of applications.
    if apps.get_containing_app_config(path) is None:
        return None
    try:
        found = import_string(path)
    except ImportError:
        return None
    return found if isinstance(found, Task) else None


def _result(task: Any, alias: str, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - of Django
    return TaskResult(
        task=task,
        id="",
        status=TaskResultStatus.READY,
        enqueued_at=timezone.now(),
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=list(args),
        kwargs=dict(kwargs),
        backend=alias,
        errors=[],
        worker_ids=[],
    )
