"""The tasks of an application."""

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

done = []


@task(queue_name="email")
def send(to, *, copy=None):
    done.append((to, copy))


@task(queue_name="email", takes_context=True)
def note(context, text):
    done.append((text, context.attempt, context.task_result.id))


@task(queue_name="email")
async def wave(to):
    done.append(to)
