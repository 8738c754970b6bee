"""The application for ``INSTALLED_APPS``."""

from django.apps import AppConfig


class LensoJobsConfig(AppConfig):
    """Has no models: an operator sets the Instance up with ``lenso-jobs setup``."""

    name = "lenso_jobs.contrib.django"
    label = "lenso_jobs"
    verbose_name = "lenso-jobs"
