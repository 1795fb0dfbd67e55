"""Send two descriptors to the process outside: the scratch folder, and a socket that listens inside the sandbox.

A descriptor keeps referring to its folder or its network namespace in any process that holds it. With these
descriptors, the process outside reads the files that the program leaves, and accepts the program's connections to the
one port. Invariant: the program gets neither descriptor.
"""

import os

_SET_FLAGS = 0x8914  # SIOCSIFFLAGS
_UP = 1
_BACKLOG = 128


def start_loopback() -> None:
    """Switch on the loopback device, which is the only device of a new network namespace."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))


def give(channel: int, port: int | None) -> None:
    """Send the current folder, and a socket that listens on a port of 127.0.0.1.

    Args:
        channel: Descriptor of a Unix socket. The function closes it.
        port: The port, or None to send no socket.
    """
    import socket  # imported only if it is needed, because it takes as long as all other imports here

    given = [os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    if port is not None:
        listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        given.append(listener.detach())
    with socket.socket(fileno=channel) as outside:
        socket.send_fds(outside, [b"1"], given)
    for descriptor in given:
        os.close(descriptor)
