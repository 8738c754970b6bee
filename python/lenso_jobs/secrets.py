"""Resolvers of secret references; any callable ``(reference) -> str`` is one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lenso_jobs._given import kind
from lenso_jobs.errors import InvalidArgument


class SecretNotFound(LookupError):
    """The reference leads to no usable secret; the message says where it was sought."""


def variable_of(reference: str) -> str:
    """Return the name of the environment variable that holds a secret."""
    return re.sub(r"[^A-Z0-9]", "_", reference.upper())


class EnvironmentSecrets:
    """Reads a reference from the environment.

    The variable is the reference in upper case with every other character ``_``:
    ``jobs/database-url`` is ``JOBS_DATABASE_URL``. The last line break is not part of
    the secret.
    """

    def __call__(self, reference: str) -> str:
        """Resolve one reference.

        Raises:
            SecretNotFound: The variable is not set, or empty.
        """
        variable = variable_of(_text(reference))
        value = os.environ.get(variable, "").removesuffix("\n").removesuffix("\r")
        if not value:
            raise SecretNotFound(
                f"the secret {reference} is not in the environment: set {variable}"
            )
        return value


class DirectorySecrets:
    """Reads a reference as a file below a directory, as Docker and Kubernetes mount them.

    The last line break is not part of the secret.

    Raises:
        InvalidArgument: *directory* is no path.
    """

    def __init__(self, directory: str | Path) -> None:
        if not isinstance(directory, str | Path) or directory == "":
            raise InvalidArgument(f"directory must be a path, not {kind(directory)}")
        self._directory = Path(directory)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._directory)!r})"

    def __call__(self, reference: str) -> str:
        """Resolve one reference.

        Raises:
            SecretNotFound: There is no such file, or it cannot be read, or is empty.
        """
        if {".", "..", ""} & set(_text(reference).split("/")):
            raise SecretNotFound(
                f"the secret {reference!r} is no path below a directory"
            )
        path = self._directory / reference
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


def _text(reference: object) -> str:
    if not isinstance(reference, str):
        raise SecretNotFound(f"the reference must be a string, not {kind(reference)}")
    return reference
