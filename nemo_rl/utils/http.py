"""Addresses of servers, and responses of bounded size."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the driver needs addresses only, and httpx imports 60 modules
    import httpx


def http_address(host: str, port: int) -> str:
    """Return the URL of a server, without a path.

    Args:
        host: name or address; one of IPv6 without brackets.
        port: of the server.
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def read_at_most(response: "httpx.Response", most: int) -> bytes | None:
    """Read the content of a streamed response as it was sent.

    Args:
        response: of a request without "Accept-Encoding", or with "identity".
        most: bytes.

    Returns:
        The content; None if it is longer, where the rest is not read.
    """
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > most:
            return None
    return bytes(content)
