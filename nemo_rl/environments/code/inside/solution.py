"""Serve the names that a solution defines: the program that runs the code of a model.

Started as `main.py INCOMING OUTGOING` next to `solution_code.py`. It knows no test: it gets the arguments of one call
and answers with its result or exception, until the other side closes the pipe.
"""

import os
import sys
import types
from typing import Any

sys.path.insert(0, os.getcwd())

from values import Channel, decode, encode


class Server:
    """The names of the solution, and the objects that the tests hold."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._objects: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        try:
            return {"result": encode(self._do(request), self._refer)}
        except Exception as error:
            return {
                "error": type(error).__name__,
                "bases": [one.__name__ for one in type(error).__mro__],
                "text": str(error)[:1000],
            }

    def _do(self, request: dict[str, Any]) -> Any:
        target = self._resolve(request["target"])
        if request["do"] == "call":
            arguments = decode(request["arguments"], self._resolve)
            return target(*arguments, **decode(request["keywords"], self._resolve))
        if request["do"] == "get":
            return getattr(target, request["name"])
        return setattr(target, request["name"], decode(request["value"], self._resolve))

    def _refer(self, value: Any) -> dict[str, Any]:
        self._objects[id(value)] = value
        return {"type": "object", "value": id(value)}

    def _resolve(self, data: dict[str, Any]) -> Any:
        return self._names[data["value"]] if data["type"] == "name" else self._objects[data["value"]]


def main(incoming: int, outgoing: int) -> None:
    """Run the solution's code, then answer requests."""
    channel = Channel(incoming, outgoing)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open("solution_code.py", encoding="utf-8") as file:
        source = file.read()
    try:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    except Exception as error:
        channel.send({"ready": f"{type(error).__name__}: {error}"[:1000]})
        raise
    channel.send({"ready": None})
    server = Server(module.__dict__)
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        channel.send(server.answer(request))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
