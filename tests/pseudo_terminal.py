"""Run programs with a pseudo-terminal as stderr."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

BAR = "\u2501"
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    *arguments: str, program: str, columns: int = 100, interrupt: bool = False, **environment: str
) -> tuple[int, str]:
    """Run a program with a pseudo-terminal as stderr; return its exit status and what it wrote there."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    settings = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stderr=follower, env=settings | {"TERM": "xterm"} | environment
    )
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:
            break
        if not block:
            break
        output += block
        if interrupt and BAR.encode() in output:
            process.send_signal(signal.SIGINT)
            interrupt = False
    os.close(leader)
    return process.wait(), output.decode()


def lines_of(output: str) -> list[str]:
    """Return the lines that a terminal was given, also those that were replaced, without escapes."""
    return [_ESCAPE.sub("", line) for line in output.replace("\r", "\n").split("\n")]
