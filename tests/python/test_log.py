"""The loggers of the package, beside an application that configures logging."""

from __future__ import annotations

import logging
import logging.config
import re
from importlib import import_module
from pathlib import Path

import pytest

import lenso_jobs
from lenso_jobs._log import Log

PACKAGE = Path(lenso_jobs.__file__).parent
LOGGERS = {
    path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".")
    for path in PACKAGE.rglob("*.py")
    if re.search(r"^logger = ", path.read_text(encoding="utf-8"), re.MULTILINE)
} - {"lenso_jobs.cli._metrics"}  # writes to the log of exposition


@pytest.fixture
def configured():
    """Configure logging as most applications do; put back which loggers are on."""
    named = logging.root.manager.loggerDict.values()
    before = {x: x.disabled for x in named if isinstance(x, logging.Logger)}
    logging.config.dictConfig({"version": 1})
    yield
    for logger, was_disabled in before.items():
        logger.disabled = was_disabled


def test_there_are_loggers():
    assert {"lenso_jobs.worker.observer", "lenso_jobs.exposition"} <= LOGGERS


@pytest.mark.parametrize("module", sorted(LOGGERS))
def test_a_logger_stays_on_when_an_application_configures_logging(
    module, request, caplog
):
    logger = import_module(module).logger
    request.getfixturevalue("configured")
    assert logger.logger.disabled

    assert logger.isEnabledFor(logging.WARNING)
    logger.warning("here %s", "I am")

    assert [record.getMessage() for record in caplog.records] == ["here I am"]


def test_a_log_whose_filter_raises_does_not_raise(caplog):
    log = Log("lenso_jobs.test")

    class Upset(logging.Filter):
        def filter(self, record):
            raise RuntimeError(record)

    upset = Upset()
    log.logger.addFilter(upset)
    try:
        log.error("nothing")
    finally:
        log.logger.removeFilter(upset)

    assert caplog.records == []


def test_a_level_that_is_off_is_not_logged(caplog):
    log = Log("lenso_jobs.test")
    log.logger.setLevel(logging.ERROR)

    log.warning("too little")
    log.error("enough")

    assert [record.getMessage() for record in caplog.records] == ["enough"]
    log.logger.setLevel(logging.NOTSET)
