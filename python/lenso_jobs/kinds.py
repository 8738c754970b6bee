"""Handlers by the kind of a job, each with the type of its payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, overload

from lenso_jobs._models import NewJob
from lenso_jobs.errors import InvalidArgument, InvalidJob, PayloadInvalid

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from datetime import datetime

    from lenso_jobs._async_client import AsyncJobs
    from lenso_jobs._client import Jobs
    from lenso_jobs._models import EnqueuedJob, LeasedJob

Lease = TypeVar("Lease", bound="LeasedJob")
Payload = TypeVar("Payload")
Returned = TypeVar("Returned")
Decorated = TypeVar("Decorated")


class Kind(Generic[Lease, Payload, Returned]):
    """The handler of one kind of job; ``Kinds`` makes it from a function.

    Call it with a lease, and it decodes the payload of that lease. Call it with a lease
    and a payload to test the function alone.
    """

    def __init__(
        self,
        kind: str,
        queue: str,
        payload: Any,  # noqa: ANN401 - a type
        max_attempts: int,
        func: Callable[[Lease, Payload], Returned],
    ) -> None:
        try:
            signature(func).bind(None, None)
        except TypeError:
            raise InvalidArgument(
                f"the handler of kind {kind} must take two arguments, the lease and the "
                "payload"
            ) from None
        self.kind = kind
        self.queue = queue
        self.max_attempts = max_attempts
        self.func = func
        self.__doc__ = func.__doc__
        self._name = getattr(payload, "__name__", repr(payload))
        self._adapter: Any = None
        if payload is not dict:
            from pydantic import TypeAdapter  # noqa: PLC0415 - only where it is used

            self._adapter = TypeAdapter(payload)

    def __repr__(self) -> str:
        return f"<Kind {self.kind} of queue {self.queue}>"

    @overload
    def __call__(self, lease: Lease, /) -> Returned: ...
    @overload
    def __call__(self, lease: Lease, payload: Payload, /) -> Returned: ...
    def __call__(self, lease: Lease, /, *payload: Payload) -> Returned:
        """Call the function with a payload, that of the lease unless another is given."""
        return self.func(lease, *(payload or (self.payload_of(lease),)))

    def payload_of(self, lease: LeasedJob) -> Payload:
        """Return the payload of a lease as the type of this kind.

        Raises:
            PayloadInvalid: It does not fit the type. A handler that lets this pass ends
                the job as failed, with code ``payload_invalid``.
            PayloadUndecodable: It cannot be decoded at all.
        """
        if self._adapter is None:
            return lease.payload  # type: ignore[return-value]
        payload: Payload
        payload, fault = self._decoded(lease.payload_json)
        if fault is not None:
            lease.payload  # noqa: B018 - raises if it is no JSON that Python can read
            error = PayloadInvalid(f"the payload does not fit {fault}")
            error.fault = fault
            raise error
        return payload

    def new_job(
        self,
        payload: Payload,
        *,
        idempotency_key: str,
        available_at: datetime | None = None,
        max_attempts: int | None = None,
    ) -> NewJob:
        """Make a job of this kind for ``enqueue_many``.

        Args:
            payload: A value of the type of this kind.
            idempotency_key: As for ``Jobs.enqueue``, and so *available_at*.
            available_at: An aware time. None: at once.
            max_attempts: 1 to 100. None: as the kind says.

        Returns:
            The job, with the payload as a JSON object.

        Raises:
            InvalidJob: *payload* does not fit the type, or would not when it is read.
        """
        if max_attempts is None:
            max_attempts = self.max_attempts
        return NewJob(
            *(self.queue, self.kind, self._encoded(payload)),
            *(idempotency_key, available_at, max_attempts),
        )

    @overload
    def enqueue(
        self,
        jobs: Jobs,
        payload: Payload,
        *,
        idempotency_key: str,
        available_at: datetime | None = None,
        max_attempts: int | None = None,
    ) -> EnqueuedJob: ...
    @overload
    def enqueue(
        self,
        jobs: AsyncJobs,
        payload: Payload,
        *,
        idempotency_key: str,
        available_at: datetime | None = None,
        max_attempts: int | None = None,
    ) -> Coroutine[Any, Any, EnqueuedJob]: ...
    def enqueue(self, jobs: Any, payload: Payload, **options: Any) -> Any:
        """Enqueue a job of this kind, as ``jobs.enqueue`` does.

        Args:
            jobs: A ``Jobs``, or an ``AsyncJobs``: then await the result.
            payload: A value of the type of this kind.
            **options: As for ``new_job``.

        Returns:
            What ``jobs.enqueue`` returns.

        Raises:
            InvalidJob: *payload* does not fit the type, or an argument is out of bounds.
            JobsError: As ``jobs.enqueue``.
        """
        return jobs.enqueue(**self.new_job(payload, **options).as_dict())

    def _encoded(self, payload: Any) -> Mapping[str, Any]:  # noqa: ANN401 - of any type
        if self._adapter is None:
            return payload  # type: ignore[no-any-return]
        try:
            encoded: Mapping[str, Any] = self._adapter.dump_python(
                payload, mode="json", by_alias=True, warnings=False
            )
            as_read = self._adapter.dump_json(payload, by_alias=True, warnings=False)
        except ValueError:
            fault: str | None = f"{self._name}: it cannot be written as JSON"
        else:
            _, fault = self._decoded(as_read)
        if fault is not None:  # outside: the text of pydantic's error holds the payload
            raise InvalidJob(f"payload does not fit {fault}")
        return encoded

    def _decoded(self, text: bytes) -> tuple[Any, str | None]:
        """Return a payload, or why it does not fit: its path and the rule, no value."""
        from pydantic import ValidationError  # noqa: PLC0415 - as above

        try:
            return self._adapter.validate_json(text), None
        except ValidationError as error:
            found = [
                f"{'.'.join(map(self._shown, each['loc'])) or 'it'} ({each['type']})"
                for each in error.errors(
                    include_url=False, include_context=False, include_input=False
                )
            ]
        return None, f"{self._name}: {', '.join(found[:5])}"

    def _shown(self, part: str | int) -> str:
        """Return a part of a path, unless it may be a key that the payload chose."""
        return str(part) if isinstance(part, int) or part in self._fields else "…"

    @cached_property
    def _fields(self) -> set[str]:
        with suppress(Exception):  # of a type that JSON schema cannot describe
            return set(_properties(self._adapter.json_schema()))
        return set()


class Decorator(Protocol[Decorated]):
    """Makes a ``Kind`` from a function of a lease and a payload."""

    def __call__(
        self, func: Callable[[Lease, Decorated], Returned], /
    ) -> Kind[Lease, Decorated, Returned]:
        """Return the kind, which is called as the function."""


class Kinds(Mapping[str, "Kind[Any, Any, Any]"]):
    """The handlers of an application, by kind.

    ::

        kinds = Kinds()

        @kinds("receipt", queue="email", payload=Receipt)
        def receipt(lease: HeldLease, payload: Receipt) -> None: ...

        receipt.enqueue(jobs, Receipt(order=1), idempotency_key="receipt:1")
        Worker(url, schema="jobs_shop", queue="email", handler=kinds).run()

    A worker releases a job of an unknown kind for a minute, which uses up no attempt.
    Another worker may have a newer release of the application. A job that was released
    100 times fails instead, with code ``unknown_kind``.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Kind[Any, Any, Any]] = {}

    @overload
    def __call__(
        self, kind: str, *, queue: str, max_attempts: int = 3
    ) -> Decorator[dict[str, Any]]: ...
    @overload
    def __call__(
        self, kind: str, *, queue: str, payload: type[Payload], max_attempts: int = 3
    ) -> Decorator[Payload]: ...
    def __call__(
        self,
        kind: str,
        *,
        queue: str,
        payload: Any = dict,
        max_attempts: int = 3,
    ) -> Any:
        """Register a handler, as a decorator.

        Args:
            kind: The kind of the jobs.
            queue: The queue that ``enqueue`` puts them into.
            payload: The type of the payload: a pydantic model, a dataclass, a TypedDict
                or another type that pydantic can read from a JSON object. By default a
                dict, which is not checked.
            max_attempts: How many attempts a job has, 1 to 100.

        Returns:
            A decorator of a function, or coroutine function, of a lease and a payload.

        Raises:
            InvalidArgument: By the decorator: the kind has a handler, or the function
                does not take two arguments.
        """

        def decorator(func: Callable[[Any, Any], Any]) -> Kind[Any, Any, Any]:
            made = Kind(kind, queue, payload, max_attempts, func)
            known = self._kinds.setdefault(kind, made)
            if known is not made:
                raise InvalidArgument(
                    f"kind {kind} has a handler: {_place(known.func)}"
                )
            return made

        return decorator

    def __getitem__(self, kind: str) -> Kind[Any, Any, Any]:
        return self._kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def _properties(schema: object) -> Iterator[str]:
    """Yield the names of all fields in a JSON schema."""
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _properties(each)


def _place(func: Callable[..., Any]) -> str:
    name = getattr(func, "__qualname__", type(func).__qualname__)
    return f"{func.__module__}.{name}"
