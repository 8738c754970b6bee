"""A Django project on the database of a test."""

import os

from psycopg.conninfo import conninfo_to_dict

_given = conninfo_to_dict(os.environ.get("JOBS_DATABASE_URL", "dbname=unused"))

SECRET_KEY = "unused"
USE_TZ = True
INSTALLED_APPS = ["lenso_jobs.contrib.django", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _given["dbname"],
        "HOST": _given.get("host", ""),
        "PORT": _given.get("port", ""),
        "USER": _given.get("user", ""),
    }
}
TASKS = {
    "default": {
        "BACKEND": "lenso_jobs.contrib.django.tasks.JobsBackend",
        "QUEUES": ["email"],
        "OPTIONS": {"schema": "jobs_email", "caller": "accounts", "max_attempts": 2},
    }
}
