from __future__ import annotations

import logging
import signal
from contextlib import closing, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from socket import AF_INET6
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from lenso_jobs._prepare import verified
from lenso_jobs.cli import _options, _render

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("lenso_jobs.exposition")

# What generate_latest writes; the newest name of the format is not everybody's.
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics(
    config: _options.Config,
    secrets_dir: _options.SecretsDir = None,
    caller: _options.Caller = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve them at /metrics, until SIGTERM or SIGINT, instead.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=600, help="Seconds that reading them may take."),
    ] = 5.0,
) -> None:
    """Print queues, workers and health as metrics for Prometheus; changes nothing.

    Acts as a declared observer. If not all could be read lenso_jobs_up is 0; printed
    once, the exit code is 1 or 2 then.
    """
    try:
        from prometheus_client import (  # noqa: PLC0415 - an extra
            CollectorRegistry,
            generate_latest,
        )

        from lenso_jobs.exposition import InstanceCollector  # noqa: PLC0415 - likewise
    except ImportError:
        _render.refuse(
            "metrics needs prometheus-client", "pip install 'lenso-jobs[prometheus]'"
        )
        raise typer.Exit(2) from None
    address = _address(listen) if listen is not None else None
    configuration, conninfo = _options.load(config, secrets_dir)
    registry = CollectorRegistry()
    with closing(
        InstanceCollector(conninfo, configuration.schema_, caller, timeout=timeout)
    ) as collector:
        registry.register(collector)
        if address is not None:
            _serve(address, partial(generate_latest, registry))
            return
        # What went wrong is told below, and once.
        logger.addHandler(logging.NullHandler())
        _render.as_is(generate_latest(registry).decode())
        if collector.error is not None:
            verified(configuration, _options.resolver(secrets_dir), caller)
            raise collector.error


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise typer.BadParameter("is not HOST:PORT", param_hint="--listen")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _serve(address: tuple[str, int], read: Callable[[], bytes]) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        server = MetricsServer(address, read)
    except (OSError, OverflowError) as error:
        raise typer.BadParameter(str(error), param_hint="--listen") from None

    def stop(*_: object) -> None:
        # It waits for the loop that this interrupts.
        Thread(target=server.shutdown).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with server:
        logger.info("listening on %s port %s", *server.server_address[:2])
        server.serve_forever()
    logger.info("stopped")


class MetricsServer(ThreadingTCPServer):
    """Answers GET /metrics with what *read* answers, each on a thread of its own."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], read: Callable[[], bytes]) -> None:
        if ":" in address[0]:
            self.address_family = AF_INET6
        self.read = read
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    server: MetricsServer
    server_version = "lenso-jobs"
    sys_version = ""

    def do_GET(self) -> None:
        # Who asked may have gone.
        with suppress(ConnectionError):
            # A proxy sends the whole URL, and anybody anything.
            try:
                path = urlsplit(self.path).path
            except ValueError:
                path = ""
            if path != "/metrics":
                self.send_error(404)
                return
            answer = self.server.read()
            self.send_response(200)
            self.send_header("Content-Type", _CONTENT_TYPE)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:  # noqa: ANN401 - the base's
        """Keep no account of who asked."""
