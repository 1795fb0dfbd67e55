"""Run the code that a model wrote, and serve the names that this code defines.

The program is started as `main.py INCOMING OUTGOING` in a folder with `solution_code.py`. It has no access to the
tests. It answers requests, such as the call of a function, until the other program closes the pipe.
"""

import io
import sys
import types
from typing import Any

from peer import Peer
from values import Channel

_MOST_PRINTED = 1 << 16  # largest number of characters in one message


class Echo(io.TextIOBase):
    """Standard output that also stores all written text."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._parts: list[str] = []
        self._length = 0

    def write(self, text: str) -> int:
        """Write a text."""
        self._stream.write(text)
        if self._length < _MOST_PRINTED:
            self._parts.append(text)
            self._length += len(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def taken(self) -> str:
        """Return the text that was written since the last call."""
        text = "".join(self._parts)[:_MOST_PRINTED]
        self._parts, self._length = [], 0
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Server(Peer):
    """Solution's end of the pipes.

    Args:
        module: Module that defines the names of the solution.
        echo: The standard output of the solution.
    """

    def __init__(self, channel: Channel, module: types.ModuleType, echo: Echo) -> None:
        super().__init__(channel, 1)
        self._module = module
        self._echo = echo

    def resolve_name(self, name: str) -> Any:
        """Return the object that a name of the solution refers to."""
        if name == "__solution__":
            return self._module
        try:
            return vars(self._module)[name]
        except KeyError:
            return super().resolve_name(name)

    def do(self, name: str, target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Do what a request asks, or return the target itself for the request `value`."""
        if name == "value":
            return target
        return super().do(name, target, arguments, keywords)

    def printed(self) -> str:
        """Return the output of the solution since the last message."""
        return self._echo.taken()


def main(incoming: int, outgoing: int) -> None:
    """Run the solution's code, and then answer requests."""
    channel = Channel(incoming, outgoing)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    echo = Echo(sys.stdout)
    sys.stdout = echo
    with open("solution_code.py", encoding="utf-8-sig", errors="surrogatepass", newline="") as file:
        source = file.read()
    try:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    except Exception as error:
        channel.send({"ready": f"{type(error).__name__}: {error}"[:1000]})
        raise
    echo.taken()
    channel.send({"ready": None})
    Server(channel, module, echo).serve()
