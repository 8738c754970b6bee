"""A log that stays on and cannot harm the code that writes to it."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """A logger that ``logging.config`` does not disable, and whose filters may raise.

    ``logging.config`` disables every logger that exists and is not in its document. A
    module of the application may call it at any time, also from a handler.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.getLogger(name), {})

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - as logging's
        """Return whether records of a level are handled."""
        self.logger.disabled = False
        return self.logger.isEnabledFor(level)

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401 - as logging's
        """Log a record, as ``logging.Logger.log``."""
        with suppress(Exception):
            if self.isEnabledFor(level):
                self.logger.log(level, msg, *args, **kwargs, stacklevel=2)
