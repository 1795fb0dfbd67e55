"""Types of keys that name a server: its address, or the host on which a server of the run listens.

Invariant: nothing is looked up or connected; a value is refused only if no network could have it.
"""

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LONGEST_HOST = 253
_HIGHEST_PORT = 65535


def is_host(name: str) -> bool:
    """Return whether a text may be a host: an IP address, or labels of letters, digits and hyphens with dots between.

    Example:
        >>> is_host("10.0.0.1"), is_host("999.1.1.1"), is_host("node-7.cluster"), is_host("a b")
        (True, False, True, False)
    """
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    except ValueError:
        labels = name.removesuffix(".").split(".")
        if labels[-1].isdecimal():  # four numbers would be an address, and no top level has such a name
            return False
        return len(name) <= _LONGEST_HOST and all(_LABEL.fullmatch(label) for label in labels)


def _checked_host(name: str) -> str:
    if not is_host(name):
        raise PydanticCustomError("host", "no host has this name; give an IP address or the name of a machine")
    return name


def _checked_address(address: str) -> str:
    """Return an address of a server, without a user, a password, a query or a fragment in it."""
    if problem := _problem_of(address):
        raise PydanticCustomError(
            "address",
            "{problem}; it must be http(s)://host[:port]/path, for example http://127.0.0.1:8000/v1",
            {"problem": problem},
        )
    return address


def _problem_of(address: str) -> str | None:
    """Return what is wrong with an address; None if it can be connected to."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        return f"the address cannot be read ({error})"
    if parts.scheme not in ("http", "https"):
        return "the address begins with neither http:// nor https://"
    if "@" in parts.netloc:
        return "the address holds a user or a password"
    if parts.query or parts.fragment:
        return "the address has a query (?) or a fragment (#)"
    if not parts.hostname or not is_host(parts.hostname):
        return f"the address has no host, or one that no network has ({parts.hostname!r})"
    if port == 0:
        return f"the address has port 0, and ports are from 1 to {_HIGHEST_PORT}"
    if any(sign.isspace() or not sign.isprintable() for sign in address):
        return "the address has spaces or control characters"
    return None


Host = Annotated[str, AfterValidator(_checked_host)]
"""The name or the IP address of a machine."""

HttpAddress = Annotated[str, AfterValidator(_checked_address)]
"""The address of a server that answers HTTP."""
