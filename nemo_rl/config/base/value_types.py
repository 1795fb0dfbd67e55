"""Define types of keys: bounded numbers, addresses of servers, and hosts on which a server listens."""

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

_MOST_WORKERS = 4096
_MOST = 10**6
_MOST_STORED = 10**12
_LARGEST = 1e9

Workers = Annotated[int, Field(gt=0, le=_MOST_WORKERS)]
"""Number of processes or threads of one machine."""
WorkersOrNone = Annotated[int, Field(ge=0, le=_MOST_WORKERS)]
"""Number of processes or threads of one machine, or 0 for none."""
Count = Annotated[int, Field(gt=0, le=_MOST)]
"""Number of things that are processed together or in sequence: samples of a step, machines, ranks, layers, attempts."""
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
"""A `Count`, or 0 for none."""
CountOrMinusOne = Annotated[int, Field(ge=-1, le=_MOST)]
"""A `Count`, or -1 with a meaning that depends on the key."""
Amount = Annotated[int, Field(gt=0, le=_MOST_STORED)]
"""Number of things that accumulate over a run or fill memory: steps, rows of a data set, bytes, characters."""
AmountOrZero = Annotated[int, Field(ge=0, le=_MOST_STORED)]
"""An `Amount`, or 0 for none."""
AmountOrMinusOne = Annotated[int, Field(ge=-1, le=_MOST_STORED)]
"""An `Amount`, or -1 with a meaning that depends on the key."""
Tokens = Annotated[int, Field(gt=0, lt=2**31)]
"""Number of tokens. Engines and kernels number tokens with 32 bits."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
"""Id of a token in a vocabulary."""
Mebibytes = Annotated[int, Field(gt=0, le=2**26)]
"""Memory in MiB, at most 64 TiB."""
ProgramMebibytes = Annotated[int, Field(ge=16, le=2**26)]
"""Memory of a program in MiB. Python does not start with less."""
Gibibytes = Annotated[float, Field(ge=0.0625, le=2.0**16)]
"""Memory in GiB. A process of the library does not start with less than 64 MiB."""
Seconds = Annotated[float, Field(gt=0, le=_LARGEST)]
"""A duration in seconds."""
Share = Annotated[float, Field(ge=0, le=1)]
"""A fraction from 0 to 1."""
Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
"""A number of either sign, such as a reward or a limit of rewards."""
Factor = Annotated[float, Field(gt=0, le=_LARGEST)]
"""A factor or a norm."""
FactorOrZero = Annotated[float, Field(ge=0, le=_LARGEST)]
"""A `Factor`, or 0, which disables the term."""
LearningRate = Annotated[float, Field(gt=0, le=1000)]
"""A learning rate."""
LearningRateOrZero = Annotated[float, Field(ge=0, le=1000)]
"""A `LearningRate`, or 0."""
Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_LONGEST_HOST = 253
_HIGHEST_PORT = 65535


def is_host(name: str) -> bool:
    """Return whether a text can be a host: an IP address, or labels of letters, digits and hyphens, joined by dots.

    Example:
        >>> is_host("10.0.0.1"), is_host("999.1.1.1"), is_host("node-7.cluster"), is_host("a b")
        (True, False, True, False)
    """
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    except ValueError:
        labels = name.removesuffix(".").split(".")
        if labels[-1].isdecimal():  # no top-level domain is a number
            return False
        return len(name) <= _LONGEST_HOST and all(_LABEL.fullmatch(label) for label in labels)


def _checked_host(name: str) -> str:
    if not is_host(name):
        raise PydanticCustomError("host", "no host has this name; give an IP address or the name of a machine")
    return name


def _checked_address(address: str) -> str:
    """Return a server's address. It must not contain a user, a password, a query or a fragment."""
    if problem := _problem_of(address):
        raise PydanticCustomError(
            "address",
            "{problem}; it must be http(s)://host[:port]/path, for example http://127.0.0.1:8000/v1",
            {"problem": problem},
        )
    return address


def _problem_of(address: str) -> str | None:
    """Return why an address cannot be used, or None."""
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
"""Name or IP address of a machine."""

HttpAddress = Annotated[str, AfterValidator(_checked_address)]
"""Address of an HTTP server."""
