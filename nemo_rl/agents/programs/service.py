"""Run programs through an HTTP service, which may be on any machine.

Invariant: a request is cancelled at the deadline of its task, and a service runs each task only once.
"""

import asyncio
import json

import httpx

from nemo_rl.agents.programs.interfaces import AgentError, AgentProgram, AgentResult, AgentTask, read_result, too_slow
from nemo_rl.utils.addresses import read_at_most

SHOWN_CHARS = 200
"""Number of characters of a response that errors show."""
_MAX_ATTEMPTS = 4
_BACKOFF_S = 0.5
_REFUSED = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
"""Status codes with which a service says that it has not run the program."""


class _MayPassError(Exception):
    """Raised if the same request may succeed later."""


class TaskPoster:
    """Post any number of tasks at the same time on one event loop.

    Args:
        largest_response: largest number of bytes of a response that are read.
    """

    def __init__(self, largest_response: int) -> None:
        self._largest = largest_response
        self._client: httpx.AsyncClient | None = None

    async def post(self, task: AgentTask, url: str, body: bytes) -> bytes:
        """Post a body, repeatedly if the service cannot be reached or refuses for the moment.

        Args:
            task: task whose key is removed from errors.
            url: address of the service.
            body: JSON text.

        Returns:
            The content of the response with status 200.

        Raises:
            AgentError: there is no such response.
        """
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return await self._posted(task, url, body)
            except _MayPassError as error:
                reason = str(error)
            if attempt + 1 < _MAX_ATTEMPTS:
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
        raise AgentError(f"{reason}, {_MAX_ATTEMPTS} times")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _posted(self, task: AgentTask, url: str, body: bytes) -> bytes:
        if self._client is None:  # constructed in the event loop that uses it
            # Connections are not kept open, because the service may close one just when the next request is sent.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(timeout=None, limits=limits, follow_redirects=False)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            async with self._client.stream("POST", url, content=body, headers=headers) as response:
                content = await read_at_most(response, self._largest)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _MayPassError(f"the service {url} failed: {_reason(error)}") from None
        except httpx.HTTPError as error:
            raise AgentError(f"the service {url} failed: {_reason(error)}") from None
        if content is None:
            raise AgentError(f"the service {url} sent more than {self._largest} bytes")
        if response.status_code != httpx.codes.OK:
            kind = _MayPassError if response.status_code in _REFUSED else AgentError
            raise kind(f"the service {url} answered with status {response.status_code}: {shown(task, content)}")
        return content


def shown(task: AgentTask, content: bytes) -> str:
    """Return the beginning of a response for an error, without the task's key."""
    return task.without_key(content.decode(errors="replace"))[:SHOWN_CHARS]


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


_LARGEST_RESPONSE = 2**20


class ServiceProgram(AgentProgram):
    """A service that gets each task in a request, and answers when the program has ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._poster = TaskPoster(_LARGEST_RESPONSE)

    async def run(self, task: AgentTask) -> AgentResult:
        """Run a program (`AgentProgram.run`). A request is repeated if the service is temporarily unavailable."""
        try:
            body = json.dumps(task.as_json).encode()
        except (TypeError, ValueError) as error:
            raise AgentError(f"the task cannot be written as JSON: {error}") from None
        try:
            async with asyncio.timeout(task.timeout_s):
                content = await self._poster.post(task, self._url, body)
        except TimeoutError:
            raise too_slow(task) from None
        try:
            return read_result(json.loads(content))
        except (ValueError, RecursionError) as error:
            raise AgentError(f"the service {self._url} sent no result: {error}: {shown(task, content)}") from None

    async def shutdown(self) -> None:
        """Close the connections."""
        await self._poster.close()
