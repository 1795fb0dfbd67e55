"""Addresses of servers and of the Ray cluster, sockets that listen, and responses of bounded size."""

import os
import socket
from typing import TYPE_CHECKING

from nemo_rl.utils.errors import ConfigError

if TYPE_CHECKING:
    import httpx


def http_address(host: str, port: int) -> str:
    """Return the URL of a server, without a path.

    Args:
        host: name or address; an IPv6 address without brackets.
        port: of the server.
    """
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def read_at_most(response: "httpx.Response", most: int) -> bytes | None:
    """Read the content of a streamed response as it was sent.

    Args:
        response: response to a request without "Accept-Encoding", or with "identity".
        most: largest number of bytes.

    Returns:
        The content, or None if it is longer than `most`, in which case the rest is not read.
    """
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > most:
            return None
    return bytes(content)


def bound_socket(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """Return a socket that listens on an address of either family, on a free port if the port is 0.

    Raises:
        OSError: the address cannot be used.
    """
    if ":" not in host:
        listener = socket.create_server((host, port), backlog=backlog)
    else:
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((host, port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=both)
    # Connections inherit it. Without it, an answer that is written in two parts waits 40 ms for the client's receipt,
    # and asyncio sets it only for sockets that were made with the number of the protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def listener_of(section: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of a section.

    Args:
        section: key of the section, for the message.
        host: address or name of an interface of this machine.
        port: 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used on this machine.
    """
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise ConfigError(
            f"{section}: cannot listen on {host}:{port}: {error}. Choose another host or port; port=0 takes a free one."
        ) from error


VARIABLE = "RAY_ADDRESS"


def cluster_address() -> str | None:
    """Return RAY_ADDRESS, or None if it is unset, empty, or `local`, so that the run starts its own Ray."""
    address = os.environ.get(VARIABLE, "").strip()
    return None if address in ("", "local") else address
