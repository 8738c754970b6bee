"""Resolvers of secret references; any callable ``(reference) -> str`` is one."""

from __future__ import annotations

import os
import re
from pathlib import Path


class SecretNotFound(LookupError):
    """The reference leads to nothing of use; the message says where it was looked for."""


class EnvironmentSecrets:
    """Reads a reference from the environment.

    The variable is the reference in upper case with every other character ``_``:
    ``jobs/database-url`` is ``JOBS_DATABASE_URL``. As of a file, the last line break is
    not part of the secret.
    """

    def __call__(self, reference: str) -> str:
        """Resolve one reference."""
        variable = re.sub(r"[^A-Z0-9]", "_", reference.upper())
        value = os.environ.get(variable, "").removesuffix("\n").removesuffix("\r")
        if not value:
            raise SecretNotFound(
                f"the secret {reference} is not in the environment: set {variable}"
            )
        return value


class DirectorySecrets:
    """Reads a reference as a file below a directory, as Docker and Kubernetes mount them.

    The last line break is not part of the secret.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._directory)!r})"

    def __call__(self, reference: str) -> str:
        """Resolve one reference."""
        path = self._directory / reference
        if {".", "..", ""} & set(reference.split("/")):
            raise SecretNotFound(
                f"the secret {reference!r} is no path below a directory"
            )
        try:
            value = path.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not text in UTF-8"
            raise SecretNotFound(
                f"the secret {path} cannot be read: {reason}"
            ) from None
        if not value:
            raise SecretNotFound(f"the secret {path} is empty")
        return value
