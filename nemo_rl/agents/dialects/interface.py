"""The interface of a dialect."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest

type Body = Mapping[str, Any]
type SessionMemory = dict[str, Any]
"""Data that a dialect keeps of a session between its requests, by keys of its own, for example conversations."""


class Event(NamedTuple):
    """A server-sent event."""

    data: Mapping[str, Any] | str
    """JSON value, or the text "[DONE]"."""
    name: str | None = None
    """Value of its field `event`; None leaves the field out."""


class Dialect(Protocol):
    """Translates one API without state, since the memory of a session holds everything that it keeps."""

    path: str
    """Path of the API below the endpoint's address, for example `/v1/chat/completions`."""

    def read(self, body: Body, memory: SessionMemory) -> CallRequest:
        """Read a request.

        Raises:
            CallError: a field is wrong (400), or asks for something that the endpoint does not do (400).
        """

    def response(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Mapping[str, Any]:
        """Write the answers as the JSON body of a response."""

    def events(
        self, body: Body, request: CallRequest, answers: Sequence[CallAnswer], memory: SessionMemory
    ) -> Iterator[Event]:
        """Write the answers as the events of a streamed response, for a request with `"stream": true`."""

    def error(self, error: CallError) -> Mapping[str, Any]:
        """Write an error as the JSON body of a response."""
