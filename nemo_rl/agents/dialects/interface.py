"""Interface of a dialect."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nemo_rl.agents.dialects.images import ImageReader
from nemo_rl.agents.endpoint.calls import CallAnswer, CallError, CallRequest

type Body = Mapping[str, Any]
type SessionMemory = dict[str, Any]
"""Data that a dialect keeps between the requests of a session, such as conversations, under keys of the dialect."""


class Event(NamedTuple):
    """A server-sent event."""

    data: Mapping[str, Any] | str
    """JSON value, or the text "[DONE]"."""
    name: str | None = None
    """Value of the event's field `event`, or None to leave the field out."""


class Dialect(Protocol):
    """Translate one API. A dialect has no state of its own, and keeps data only in the memory of a session."""

    path: str
    """Path of the API below the endpoint's address, for example `/v1/chat/completions`."""

    def read(self, body: Body, memory: SessionMemory, images: ImageReader | None = None) -> CallRequest:
        """Read a request.

        Args:
            images: reads the images of the request. None for a policy that reads text only.

        Raises:
            CallError: a field is wrong, or the endpoint does not support its value (status 400 for both).
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
