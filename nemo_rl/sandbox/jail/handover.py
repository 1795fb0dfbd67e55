"""Give the process outside the scratch folder of this sandbox, and a socket that listens in the sandbox.

A descriptor keeps its folder and its namespace of networks whoever holds it: the process outside reads files that the
program leaves, and accepts the connections that the program makes to the one port. Invariant: the program gets neither
descriptor.
"""

import os

_SET_FLAGS = 0x8914  # SIOCSIFFLAGS
_UP = 1
_BACKLOG = 128


def start_loopback() -> None:
    """Switch the loopback device of a new namespace of networks on, which has no other."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def give(channel: int, port: int | None) -> None:
    """Send the current folder, and a socket that listens on a port of 127.0.0.1.

    Args:
        channel: Descriptor of a Unix socket, which is closed.
        port: The port; None for no socket.
    """
    import socket  # only here, because it takes as long to import as everything else here

    given = [os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    if port is not None:
        listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        given.append(listener.detach())
    with socket.socket(fileno=channel) as outside:
        socket.send_fds(outside, [b"1"], given)
    for descriptor in given:
        os.close(descriptor)
