"""A proxy before the server that drops the reply to a chosen statement."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from threading import Event, Lock, Thread

from psycopg.conninfo import conninfo_to_dict

DEADLINE = 20.0


class Cut:
    """One answer to lose: that of the next statement with some words in it."""

    def __init__(self, words):
        self._words = words.lower().encode()
        self.happened = Event()
        self.status = None

    def concerns(self, statement):
        return self._words in statement.lower()

    def note(self, status):
        """Keep in which state the server was: I is idle, so what it did is committed."""
        self.status = status.decode()
        self.happened.set()


class _Dialogue:
    """The statements sent on one connection, and the reply to drop."""

    def __init__(self, cuts):
        self._cuts = cuts
        self._prepared = {}
        self._asked = 1  # the start of the session, which is answered as a query is
        self._answered = 0
        self._lost = None

    def ask(self, message):
        kind, body = message[:1], message[5:]
        if kind == b"P":
            name, statement, _ = body.split(b"\0", 2)
            self._prepared[name] = statement
        statement = None
        if kind == b"B":
            statement = self._prepared.get(body.split(b"\0", 2)[1])
        elif kind == b"Q":
            statement = body
        cut = statement and self._cuts.take(statement)
        if cut:
            self._lost = self._asked + 1, cut
        self._asked += kind in (b"Q", b"S")

    def answer(self, message):
        """Whether a message may pass; raises ConnectionAbortedError in its place."""
        is_last = message[:1] == b"Z"
        if self._lost and self._answered + 1 == self._lost[0]:
            if is_last:
                self._lost[1].note(message[5:6])
                raise ConnectionAbortedError
            return False
        self._answered += is_last
        return True


class Cutter:
    """A proxy on the loopback before the server, which cuts connections on demand.

    The reply to the chosen statement is read to its end and not passed on. So a
    statement that commits by itself is committed.

    ``address`` is what takes a connection through it. A statement is what one message
    holds: to lose the answer to a COMMIT, say ``cut("commit")``.
    """

    def __init__(self, conninfo):
        self._server = conninfo_to_dict(conninfo)
        self._armed = []
        self._lock = Lock()
        self._started = Future()
        self._thread = Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self):
        self._thread.start()
        port, self._loop = self._started.result(timeout=DEADLINE)
        self.address = {
            "host": "127.0.0.1",
            "port": port,
            "sslmode": "disable",
            "gssencmode": "disable",
        }
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=DEADLINE)

    def cut(self, words):
        """Lose the answer to the next statement with these words and return the Cut."""
        cut = Cut(words)
        with self._lock:
            self._armed.append(cut)
        return cut

    def take(self, statement):
        with self._lock:
            for cut in self._armed:
                if cut.concerns(statement):
                    self._armed.remove(cut)
                    return cut
        return None

    async def _run(self):
        self._stop = asyncio.Event()
        self._serving = set()
        try:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        except BaseException as error:
            self._started.set_exception(error)
            raise
        port = server.sockets[0].getsockname()[1]
        self._started.set_result((port, asyncio.get_running_loop()))
        await self._stop.wait()
        server.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader, writer):
        self._serving.add(asyncio.current_task())
        dialogue = _Dialogue(self)
        host, port = self._server["host"], self._server.get("port", 5432)
        try:
            if host.startswith("/"):
                path = f"{host}/.s.PGSQL.{port}"
                server, to_server = await asyncio.open_unix_connection(path)
            else:
                server, to_server = await asyncio.open_connection(host, port)
        except OSError:  # there is no server now
            writer.close()
            self._serving.discard(asyncio.current_task())
            return

        async def asks():
            message = await _message(reader, kind=False)
            while True:
                to_server.write(message)
                await to_server.drain()
                message = await _message(reader)
                dialogue.ask(message)

        async def answers():
            while True:
                message = await _message(server)
                if dialogue.answer(message):
                    writer.write(message)
                    await writer.drain()

        tasks = [asyncio.create_task(x) for x in (asks(), answers(), self._stop.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, to_server):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()
        self._serving.discard(asyncio.current_task())


async def _message(reader, *, kind=True):
    """Read one message of PostgreSQL's protocol; the first of all has no kind."""
    head = await reader.readexactly(5 if kind else 4)
    length = int.from_bytes(head[-4:], "big")
    return head + await reader.readexactly(length - 4)
