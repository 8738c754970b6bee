"""``manage.py lenso_work``: the command ``lenso-jobs work`` within Django."""

from __future__ import annotations

import sys

from django.core.management.base import BaseCommand

from lenso_jobs.cli import main
from lenso_jobs.contrib.django import with_connections


class Command(BaseCommand):
    """Runs a handler for each job, and closes Django's connections around it."""

    help = (
        "Run a handler for each job of a queue. Takes the options of lenso-jobs work."
    )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run ``lenso-jobs work`` with the options that are not Django's."""
        from lenso_jobs.cli import _work  # noqa: PLC0415 - needs the extra cli

        parser = self.create_parser(
            argv[0], argv[1], allow_abbrev=False, add_help=False
        )
        _, ours = parser.parse_known_args(argv[2:])
        _work.wrappers.append(with_connections)
        sys.argv = [argv[0], "work", *ours]
        main()
