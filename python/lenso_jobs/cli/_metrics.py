"""Metrics of an Instance for Prometheus, printed once or served."""

from __future__ import annotations

import logging
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from lenso_jobs.cli import LEAVING, _options, handled
from lenso_jobs.cli._screen import as_is

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("lenso_jobs.exposition")


def metrics(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve them over HTTP until a signal ends it."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds that reading may take.")
    ] = 5.0,
) -> None:
    """Print queues, workers and health as metrics for Prometheus; changes nothing.

    Acts as a declared observer. If something could not be read, lenso_jobs_up is 0.
    Printed once, the exit code is then 1 or 2.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    from lenso_jobs._prepare import verified
    from lenso_jobs.errors import Translated
    from lenso_jobs.exposition import InstanceCollector

    address = _address(listen) if listen is not None else None
    configuration, conninfo = _options.load(config, secrets_dir)
    registry = CollectorRegistry()
    with closing(
        InstanceCollector(conninfo, configuration.schema_, caller, timeout=timeout)
    ) as collector:
        registry.register(collector)
        if address is not None:
            _serve(*address, registry)
            return
        # The error is printed below, and once.
        logger.addHandler(logging.NullHandler())
        as_is(generate_latest(registry).decode())
        if collector.error is not None:
            verified(configuration, _options.resolver(secrets_dir), caller)
            with _options.hinting(configuration), Translated():
                raise collector.error


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise typer.BadParameter("is not HOST:PORT", param_hint="--listen")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _serve(host: str, port: int, registry: CollectorRegistry) -> None:
    from prometheus_client import start_http_server

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        with handled((signal.SIGINT, *LEAVING), signal.default_int_handler):
            server, thread = start_http_server(port, host, registry)
            logger.info("listening on %s port %s", host, server.server_port)
            # A signal just before the wait begins is handled after it.
            while thread.is_alive():
                thread.join(1.0)
    except (OSError, OverflowError) as error:
        raise typer.BadParameter(str(error), param_hint="--listen") from None
    except KeyboardInterrupt:
        logger.info("stopped")
