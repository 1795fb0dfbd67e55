"""An MCP server over stdio with a state, for tests."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.types import ContentBlock, ImageContent, TextContent

server = MCPServer("tests")
notes: list[str] = []


@server.tool()
def note(text: str) -> str:
    """Keep a text and return all texts so far."""
    notes.append(text)
    return ",".join(notes)


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable of the server, and its process id."""
    return f"{os.environ.get(name, '')} {os.getpid()}"


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(3600)
    return "late"


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("broken")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def much() -> str:
    """Return a million characters."""
    return "x" * 1_000_000


@server.tool()
def draw(data: str) -> list[ContentBlock]:
    """Return an image between two texts."""
    image = ImageContent(type="image", data=data, mime_type="image/png")
    return [TextContent(type="text", text="before"), image, TextContent(type="text", text="after")]


if __name__ == "__main__":
    sys.stderr.write("noise\n" * 1000)
    server.run()
