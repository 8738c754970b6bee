"""The command ``lenso-jobs``."""

from lenso_jobs.cli._app import main

__all__ = ["main"]
