"""Programs that try to leave a sandbox, to use up the machine, or to survive.

Each prints ESCAPED when it did what it must not do. Names in capitals are set by the test: see `Machine`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from nemo_rl.sandbox import End

BEGIN = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
LIBC = ctypes.CDLL(None, use_errno=True)
def escaped(): print("ESCAPED", flush=True)
def read(path):
    if open(path, "rb").read(): escaped()
def ok(result):
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    escaped()
"""
"""What every attempt starts with."""


@dataclass(frozen=True)
class Machine:
    """What attempts are aimed at.

    Attributes:
        secret: a file that must not be read or changed, in a folder that may be written to outside.
        port: of a TCP and a UDP server on 127.0.0.1 in the test's process.
        unix: path of a Unix socket on which the test listens.
        datagram: path of a Unix socket on which it gets datagrams.
        abstract: name of an abstract Unix socket on which it listens.
        pid: of the test's process.
        repository: folder of the repository.
        library: a file that programs may read, and that any user may change outside.
    """

    secret: Path
    port: int
    unix: Path
    datagram: Path
    abstract: str
    pid: int
    repository: Path
    library: Path

    def program(self, attempt: str) -> str:
        """Return the source of an attempt."""
        names = {
            "SECRET": str(self.secret),
            "FOLDER": str(self.secret.parent),
            "PORT": self.port,
            "UNIX": str(self.unix),
            "DATAGRAM": str(self.datagram),
            "ABSTRACT": "\0" + self.abstract,
            "PID": self.pid,
            "REPOSITORY": str(self.repository),
            "LIBRARY": str(self.library),
            "PACKAGES": next(path for path in sys.path if path.endswith("site-packages")),
        }
        return "\n".join([BEGIN, *(f"{name} = {value!r}" for name, value in names.items()), attempt])


FILES = {
    "read a file": "read(SECRET)",
    "read a file through a link": "os.symlink(SECRET, 'link'); read('link')",
    "read a file through a hard link": "os.link(SECRET, 'link'); read('link')",
    "read a file through the parent folder": "read('../' * 20 + SECRET)",
    "read a file through /proc/1/root": "read('/proc/1/root' + SECRET)",
    "read a file through /proc/self/root": "read('/proc/self/root' + SECRET)",
    "read a file through the root of the parent": "read(f'/proc/{PID}/root' + SECRET)",
    "read a file through the folder of the parent": "read(f'/proc/{PID}/cwd/pyproject.toml')",
    "read users": "read('/etc/passwd')",
    "read passwords": "read('/etc/shadow')",
    "list the root of the parent": "if os.listdir(f'/proc/{PID}/root'): escaped()",
    "list home": "if os.listdir('/root'): escaped()",
    "list the repository": "if os.listdir(REPOSITORY): escaped()",
    "read a test of the repository": "read(REPOSITORY + '/tests/unit/sandbox/attempts.py')",
    "list the files of Ray": "if os.listdir('/tmp/ray') or True: escaped()",
    "import an installed package": "sys.path.append(PACKAGES); import torch; escaped()",
    "import the library": "sys.path.append(REPOSITORY); import nemo_rl; escaped()",
    "write next to a file": "open(FOLDER + '/new', 'w').write('x'); escaped()",
    "write a file": "open(SECRET, 'w').write('x'); escaped()",
    "append to a file": "open(SECRET, 'a').write('x'); escaped()",
    "truncate a file": "os.truncate(SECRET, 0); escaped()",
    "remove a file": "os.remove(SECRET); escaped()",
    "rename a file": "os.rename(SECRET, SECRET + '2'); escaped()",
    "move a file in": "os.rename(SECRET, 'mine'); escaped()",
    "change the mode of a file": "os.chmod(SECRET, 0o777); escaped()",
    "change the owner of a file": "os.chown(SECRET, 1, 1); escaped()",
    "change the times of a file": "os.utime(SECRET, (1, 1)); escaped()",
    "write into Python": "open(os.__file__, 'a').write(' '); escaped()",
    "replace a file of Python": "os.rename(os.__file__, 'os.py'); escaped()",
    "change the mode of Python": "os.chmod(os.__file__, 0o777); escaped()",
    "write into /tmp": "open('/tmp/from_sandbox', 'w').write('x'); escaped()",
    "write into shared memory": "open('/dev/shm/from_sandbox', 'w').write('x'); escaped()",
    "write into the root": "open('/from_sandbox', 'w').write('x'); escaped()",
    "make a device": "os.mknod('disk', 0o60666, os.makedev(8, 0)); escaped()",
    "read memory of the machine": "read('/dev/mem')",
    "read the messages of the kernel": "open('/dev/kmsg').read(1); escaped()",
    "change a setting of the kernel": "open('/proc/sys/kernel/hostname', 'w').write('x'); escaped()",
    "write into a control group": "open('/sys/fs/cgroup/cgroup.procs', 'a').write('1'); escaped()",
    "find an open folder": """
for number in range(3, 1024):
    try:
        read(f'/proc/self/fd/{number}/..' + SECRET)
    except OSError: pass
    try:
        os.stat('.', dir_fd=number); escaped()
    except OSError: pass
""",
    "change the root": "os.chroot('/'); escaped()",
    "mount": "ok(LIBC.mount(b'none', b'.', b'tmpfs', 0, None))",
    "mount with the new calls": "ok(LIBC.syscall(430, b'tmpfs', 0))",
    "open by handle": "ok(LIBC.syscall(303, -100, SECRET.encode(), ctypes.create_string_buffer(200), b'0' * 8, 0))",
    "enter the namespace of the parent": "os.setns(os.open(f'/proc/{PID}/ns/mnt', os.O_RDONLY)); escaped()",
}

TRUNCATIONS = {
    "empty a file by its path": "os.truncate(SECRET, 0); escaped()",
    "empty a file by the call": "ok(LIBC.syscall(76, SECRET.encode(), 0))",
    "shorten a file": "os.truncate(SECRET, 3); escaped()",
    "lengthen a file": "os.truncate(SECRET, 10_000); escaped()",
    "empty a file on opening": "os.open(SECRET, os.O_WRONLY | os.O_TRUNC); escaped()",
    "empty a file on opening it for reading": "os.open(SECRET, os.O_RDONLY | os.O_TRUNC); escaped()",
    "empty a file on opening it for both": "os.open(SECRET, os.O_RDWR | os.O_TRUNC); escaped()",
    "empty a file on opening it for nothing": "os.open(SECRET, 3 | os.O_TRUNC); escaped()",
    "empty a file by creat": "ok(LIBC.creat(SECRET.encode(), 0o666))",
    "empty a file through a link": "os.symlink(SECRET, 'link'); os.truncate('link', 0); escaped()",
    "empty a file through a hard link": "os.link(SECRET, 'link'); os.truncate('link', 0); escaped()",
    "empty a file through a folder": "os.truncate(FOLDER + '/./' + os.path.basename(SECRET), 0); escaped()",
    "empty a file through a handle for paths": "os.ftruncate(os.open(SECRET, os.O_PATH), 0); escaped()",
    "punch a hole into a file": "ok(LIBC.fallocate(os.open(SECRET, os.O_RDWR), 3, 0, 4096))",
    "empty a library": "os.truncate(LIBRARY, 0); escaped()",
    "empty a library on opening it for reading": "os.open(LIBRARY, os.O_RDONLY | os.O_TRUNC); escaped()",
    "empty a library on opening it for nothing": "os.open(LIBRARY, 3 | os.O_TRUNC); escaped()",
    "empty a library by creat": "ok(LIBC.creat(LIBRARY.encode(), 0o666))",
    "empty a library by its descriptor": "os.ftruncate(os.open(LIBRARY, os.O_RDONLY), 0); escaped()",
    "empty a library through a link": "os.symlink(LIBRARY, 'link'); os.open('link', os.O_TRUNC); escaped()",
    "empty a library through a hard link": "os.link(LIBRARY, 'link'); os.truncate('link', 0); escaped()",
    "copy over a library": "os.copy_file_range(os.open('main.py', 0), os.open(LIBRARY, os.O_RDWR), 9); escaped()",
    "write into a library": "open(LIBRARY, 'r+b').write(b'x'); escaped()",
    "map a library for writing": """
import mmap
mmap.mmap(os.open(LIBRARY, os.O_RDONLY), 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)[0] = 0; escaped()
""",
}
"""Attempts to change the length or the bytes of a file outside of the scratch folder."""

MOVES = {
    "remove a library": "os.remove(LIBRARY); escaped()",
    "rename a library": "os.rename(LIBRARY, LIBRARY + '2'); escaped()",
    "rename over a file": "open('mine', 'w').write('x'); os.rename('mine', SECRET); escaped()",
    "rename over a library": "open('mine', 'w').write('x'); os.rename('mine', LIBRARY); escaped()",
    "exchange a file": """
open('mine', 'w').write('x')
ok(LIBC.renameat2(-100, b'mine', -100, SECRET.encode(), 2))
""",
    "exchange a library": """
open('mine', 'w').write('x')
ok(LIBC.renameat2(-100, b'mine', -100, LIBRARY.encode(), 2))
""",
    "move a library in": "os.rename(LIBRARY, 'mine'); escaped()",
    "link a library in": "os.link(LIBRARY, 'mine'); open('mine', 'r+b').write(b'x'); escaped()",
    "link a file out": "open('mine', 'w').write('x'); os.link('mine', FOLDER + '/new'); escaped()",
    "link a file by its descriptor": """
place = os.open(SECRET, os.O_PATH)
ok(LIBC.linkat(place, b'', -100, b'mine', 0x1000)); read('mine')
""",
    "make a link outside": "os.symlink('/', FOLDER + '/new'); escaped()",
    "make a folder outside": "os.mkdir(FOLDER + '/new'); escaped()",
    "make a pipe outside": "os.mkfifo(FOLDER + '/new'); escaped()",
    "make a file without a name outside": "os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600); escaped()",
    "remove the folder": "os.rename(FOLDER, FOLDER + '2'); escaped()",
    "open a library by handle": """
handle = ctypes.create_string_buffer(bytes([128, 0, 0, 0]) + bytes(140))
ok(LIBC.syscall(303, -100, LIBRARY.encode(), handle, ctypes.byref(ctypes.c_int()), 0))
ok(LIBC.syscall(304, os.open('.', 0), handle, os.O_RDWR))
""",
    "change the mode of a library": "os.chmod(LIBRARY, 0o600); escaped()",
    "change the mode by a descriptor": "os.fchmod(os.open(LIBRARY, 0), 0o600); escaped()",
    "change the times of a library": "os.utime(LIBRARY, (1, 1)); escaped()",
    "give a library an attribute": "os.setxattr(LIBRARY, 'user.x', b'x'); escaped()",
    "change the flags of a library": "import fcntl; fcntl.ioctl(os.open(LIBRARY, 0), 0x40086602, b'0' * 8); escaped()",
    "lease a library": "import fcntl; fcntl.fcntl(os.open(LIBRARY, 0), 1024, 0); escaped()",
    "lease a library for itself": """
import fcntl
open('mine', 'w').close()
fcntl.fcntl(os.open('mine', 0), fcntl.F_SETLEASE, fcntl.F_WRLCK); escaped()
""",
    "watch a folder of libraries": "import fcntl; fcntl.fcntl(os.open('/usr/lib', 0), fcntl.F_NOTIFY, 4); escaped()",
    "watch a library": "ok(LIBC.inotify_init1(0))",
}
"""Attempts to change names, attributes and locks of files outside of the scratch folder."""

KERNEL = {
    "raise the buffer of a socket": """
one, other = socket.socketpair()
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22); escaped()
""",
    "raise the other buffer of a socket": """
one, other = socket.socketpair()
one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22); escaped()
""",
    "force the buffer of a socket": "socket.socketpair()[0].setsockopt(1, 32, 2**22); escaped()",
    "force the other buffer of a socket": "socket.socketpair()[0].setsockopt(1, 33, 2**22); escaped()",
    "filter a socket": "socket.socketpair()[0].setsockopt(1, 26, bytes(16)); escaped()",
    "raise a pipe": "import fcntl; fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 2**20); escaped()",
    "make a queue of messages": "ok(LIBC.msgget(0, 0o1666))",
    "make a queue by name": "ok(LIBC.mq_open(b'/x', 0o102, 0o600, None))",
    "make semaphores": "ok(LIBC.semget(0, 100, 0o1666))",
    "add a key": "ok(LIBC.syscall(248, b'user', b'x', b'x' * 1000, 1000, -3))",
    "make a timer": "ok(LIBC.syscall(222, 0, None, ctypes.byref(ctypes.c_int())))",
    "prepare asynchronous calls": "ok(LIBC.syscall(206, 65536, ctypes.byref(ctypes.c_ulong())))",
    "give pages to a pipe": "ok(LIBC.vmsplice(os.pipe()[1], None, 0, 0))",
    "make secret memory": "ok(LIBC.syscall(447, 0))",
    "hold a lock of a range": """
import fcntl, struct
one, other = (os.open('x', os.O_CREAT | os.O_RDWR) for _ in range(2))
fcntl.fcntl(one, 37, struct.pack('hhqqi4x', 1, 0, 0, 10, 0))
if struct.unpack_from('h', fcntl.fcntl(other, 36, struct.pack('hhqqi4x', 1, 0, 0, 10, 0)))[0] != 2: escaped()
raise OSError('The lock took no memory.')
""",
}
"""Attempts to take memory of the kernel that no limit counts."""

OTHERS = {
    "ask for the group of the parent": "os.getpgid(PID); escaped()",
    "ask for the session of the parent": "os.getsid(PID); escaped()",
    "ask for the priority of the parent": "os.getpriority(os.PRIO_PROCESS, PID); escaped()",
    "ask for the processors of the parent": "os.sched_getaffinity(PID); escaped()",
    "ask for the schedule of the parent": "os.sched_getscheduler(PID); escaped()",
    "ask for a parameter of the parent": "os.sched_getparam(PID); escaped()",
    "ask for the capabilities of the parent": """
header = (ctypes.c_uint32 * 2)(0x20080522, PID)
ok(LIBC.syscall(125, header, (ctypes.c_uint32 * 6)()))
""",
    "ask for the clock of the parent": "time.clock_gettime(~PID << 3 | 2); escaped()",
    "ask for the precision of a clock of the parent": "time.clock_getres(~PID << 3 | 2); escaped()",
    "ask for the locks of the parent": """
ok(LIBC.syscall(274, PID, ctypes.byref(ctypes.c_ulong()), ctypes.byref(ctypes.c_ulong())))
""",
    "be root": "if 0 in (os.getuid(), os.getgid(), *os.getgroups()): escaped()\nraise OSError('another user')",
    "be root again": "os.setuid(0); escaped()",
}
"""Attempts to learn which processes exist, or to be another user."""

PROCESSES = {
    "kill the parent": "if os.getppid() > 1: os.kill(os.getppid(), signal.SIGTERM); escaped()\nos.kill(PID, 0)",
    "kill the test": "os.kill(PID, signal.SIGTERM); escaped()",
    "stop the test": "os.kill(PID, signal.SIGSTOP); escaped()",
    "probe for the test": "os.kill(PID, 0); escaped()",
    "signal a thread of the test": "ok(LIBC.syscall(234, PID, PID, 0)); ok(LIBC.syscall(200, PID, 0))",
    "signal through a descriptor": "signal.pidfd_send_signal(os.pidfd_open(PID), 0); escaped()",
    "signal by the owner of a pipe": """
import fcntl
one, other = os.pipe()
fcntl.fcntl(one, fcntl.F_SETOWN, PID); escaped()
""",
    "queue a signal": "ok(LIBC.syscall(129, PID, 10, ctypes.create_string_buffer(128)))",
    "trace the test": "ok(LIBC.ptrace(16, PID, 0, 0))",
    "read memory of the test": """
buffer = ctypes.create_string_buffer(64)
piece = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 1)
ok(LIBC.syscall(310, PID, piece, 1, piece, 1, 0))
""",
    "open memory of the test": "open(f'/proc/{PID}/mem', 'rb'); escaped()",
    "read variables of the test": "read(f'/proc/{PID}/environ')",
    "read the command of the test": "read(f'/proc/{PID}/cmdline')",
    "read variables of the parent": "read(f'/proc/{os.getppid()}/environ')",
    "read a variable": "if 'SANDBOX_TEST_SECRET' in os.environ: escaped()",
    "steal a descriptor": "ok(LIBC.syscall(438, os.pidfd_open(PID), 0, 0))",
    "limit the test": "import resource; resource.prlimit(PID, resource.RLIMIT_NOFILE, (10, 10)); escaped()",
    "slow the test down": "os.setpriority(os.PRIO_PROCESS, PID, 19); escaped()",
    "pin the test": "os.sched_setaffinity(PID, {0}); escaped()",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); escaped()",
    "become root": "os.setresuid(0, 0, 0); escaped() if open('/etc/shadow').read() else None",
    "take capabilities": """
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
ok(LIBC.syscall(126, header, (ctypes.c_uint32 * 6)(0xffffffff, 0xffffffff, 0, 0, 0, 0)))
""",
    "make a namespace of users": "os.unshare(os.CLONE_NEWUSER); escaped()",
    "clone with a namespace of users": "ok(LIBC.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "clone with the new call": "ok(LIBC.syscall(435, (ctypes.c_uint64 * 11)(0x10000000), 88))",
    "load a program into the kernel": "ok(LIBC.syscall(321, 0, ctypes.create_string_buffer(128), 128))",
    "count events": "ok(LIBC.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0))",
    "submit calls through a ring": "ok(LIBC.syscall(425, 8, ctypes.create_string_buffer(128)))",
    "handle page faults": "ok(LIBC.syscall(323, 0))",
    "use keys of the kernel": "ok(LIBC.syscall(250, 0, -3, 0))",
    "run a program of the system": "subprocess.run(['/bin/sh', '-c', 'true'], check=True); escaped()",
    "run a program with the rights of root": "subprocess.run(['/usr/bin/su', '--version'], check=True); escaped()",
    "run a program from memory": """
place = os.memfd_create('program')
os.write(place, open(sys.executable, 'rb').read())
os.execve(place, ['python', '-c', 'print("ESCAPED")'], {})
""",
    "type into the terminal": "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, b'x'); escaped()",
    "use the other call table": "ok(LIBC.syscall(0x40000000 + 41, 2, 1, 0))",
}

NETWORK = {
    "connect to the machine": "socket.create_connection(('127.0.0.1', PORT)); escaped()",
    "connect over IPv6": "socket.socket(socket.AF_INET6).connect(('::1', PORT)); escaped()",
    "send a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT)); escaped()",
    "connect to a Unix socket": "socket.socket(socket.AF_UNIX).connect(UNIX); escaped()",
    "connect to an abstract socket": "socket.socket(socket.AF_UNIX).connect(ABSTRACT); escaped()",
    "turn a pair of sockets round": """
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.connect(ABSTRACT); escaped()
""",
    "send to an abstract socket": """
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', ABSTRACT); escaped()
""",
    "send to a Unix socket": """
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', DATAGRAM); escaped()
""",
    "send a message to a Unix socket": """
socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)[0].sendmsg([b'x'], [], 0, DATAGRAM); escaped()
""",
    "listen": "one = socket.socket(); one.bind(('127.0.0.1', 0)); one.listen(); escaped()",
    "make a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); escaped()",
    "ask the kernel for its network": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); escaped()",
    "connect to the host of the machine": "socket.socket(40, socket.SOCK_STREAM); escaped()",
    "look up a name": "socket.getaddrinfo('example.com', 80); escaped()",
}

ESCAPES = FILES | TRUNCATIONS | MOVES | PROCESSES | NETWORK | KERNEL | OTHERS
"""All programs that must not print ESCAPED."""

SURVIVAL = {
    "leave a child": "if os.fork() == 0: time.sleep(60)",
    "leave a child of a child": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.close(0); os.close(1); os.close(2)
        time.sleep(60)
    os._exit(0)
""",
    "ignore signals": """
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
if os.fork() == 0: time.sleep(60)
time.sleep(60)
""",
    "hold the output open": "if os.fork() == 0: time.sleep(60)\nos._exit(0)",
    "leave a thread": "threading.Thread(target=time.sleep, args=(60,)).start()",
    "fork at exit": "import atexit; atexit.register(lambda: os.fork() == 0 and time.sleep(60))",
    "end the first process": "os.kill(1, signal.SIGKILL); time.sleep(60)",
    "end all processes": "os.kill(-1, signal.SIGKILL); time.sleep(60)",
    "stop itself": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)",
    "end by a fault": "ctypes.string_at(0)",
    "start over and over": "if os.fork() == 0:\n    while True:\n        if os.fork(): os._exit(0)",
}

FILL_SOCKETS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
for _ in range(6):
    if os.fork() == 0: break
held = []
for number in range(60): held += socket.socketpair()
for one in held:
    one.setblocking(False)
    try:
        while True: one.send(bytes(1000))
    except OSError: pass
time.sleep(100)
"""
"""Fills some 25 MB of kernel memory in each of seven processes."""

EXHAUSTION = {
    "print 1 GB": ("for _ in range(1024): sys.stdout.write('x' * 2**20)", {End.OUTPUT}),
    "print errors without end": ("while True: sys.stderr.write('x' * 2**20)", {End.OUTPUT}),
    "print from a child": ("os.fork()\nwhile True: os.write(1, b'x' * 2**16)", {End.OUTPUT, End.EXITED}),
    "loop": ("while True: pass", {End.CPU_TIME, End.WALL_TIME}),
    "loop and ignore the signal": (
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        {End.CPU_TIME, End.WALL_TIME},
    ),
    "loop in children": (
        "for _ in range(6):\n    if os.fork() == 0: break\nwhile True: pass",
        {End.CPU_TIME, End.WALL_TIME, End.EXITED},
    ),
    "loop outside of Python": ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", {End.CPU_TIME, End.WALL_TIME}),
    "compute a large power": ("print(len(str(7 ** 10 ** 9)))", {End.CPU_TIME, End.MEMORY, End.EXITED, End.WALL_TIME}),
    "sleep": ("time.sleep(100)", {End.WALL_TIME}),
    "wait for input": ("one, other = os.pipe(); os.read(one, 1)", {End.WALL_TIME}),
    "take memory at once": ("x = bytearray(10**9); escaped()", {End.EXITED}),
    "take memory in pieces": ("x = []\nwhile True: x.append(bytearray(2**20))", {End.EXITED, End.MEMORY}),
    "take memory in children": (
        "for _ in range(6):\n    if os.fork() == 0: break\nx = bytearray(b'1') * (100 * 2**20); time.sleep(100)",
        {End.MEMORY, End.EXITED, End.WALL_TIME},
    ),
    "take shared memory": ("import mmap\nx = mmap.mmap(-1, 10**9); escaped()", {End.EXITED}),
    "take shared memory in children": (
        "import mmap\nfor _ in range(6):\n    os.fork()\n    x = mmap.mmap(-1, 100 * 2**20)\n"
        "    x.write(b'1' * len(x))\ntime.sleep(100)",
        {End.MEMORY, End.EXITED, End.PROCESSES},
    ),
    "take memory of the kernel": ("ok(LIBC.shmget(0, 10**8, 0o1666))", {End.EXITED}),
    "take memory through a file in memory": ("os.memfd_create('x'); escaped()", {End.EXITED}),
    "take memory that stays": ("LIBC.mlockall.restype = ctypes.c_int; ok(LIBC.mlockall(3))", {End.EXITED}),
    "fork without end": ("while True: os.fork()", {End.EXITED, End.WALL_TIME, End.CPU_TIME, End.PROCESSES}),
    "fork and try again": (
        "while True:\n    try: os.fork()\n    except OSError: pass",
        {End.WALL_TIME, End.CPU_TIME, End.PROCESSES, End.MEMORY},
    ),
    "start threads without end": (
        "while True: threading.Thread(target=time.sleep, args=(100,)).start()",
        {End.EXITED, End.PROCESSES, End.WALL_TIME, End.MEMORY},
    ),
    "write a large file": ("open('x', 'wb').write(b'x' * (10 * 2**20)); escaped()", {End.EXITED}),
    "make a large file": ("os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 2**40); escaped()", {End.EXITED}),
    "write many files": (
        "for number in range(100):\n    open(str(number), 'wb').write(b'x' * (4 * 2**20))\ntime.sleep(1); escaped()",
        {End.EXITED, End.SCRATCH},
    ),
    "make many files": (
        "for number in range(100_000): open(str(number), 'w').close()\nescaped()",
        {End.EXITED, End.SCRATCH, End.WALL_TIME, End.CPU_TIME},
    ),
    "make many folders": (
        "while True:\n    os.mkdir('x'); os.chdir('x')",
        {End.EXITED, End.SCRATCH, End.WALL_TIME, End.CPU_TIME},
    ),
    "open many files": ("x = [os.open('main.py', os.O_RDONLY) for _ in range(5000)]; escaped()", {End.EXITED}),
    "fill pipes": ("x = [os.pipe() for _ in range(5000)]; escaped()", {End.EXITED}),
    "recurse": ("sys.setrecursionlimit(10**8)\ndef f(): return [f()]\nf()", {End.EXITED, End.CPU_TIME, End.WALL_TIME}),
    "nest brackets": ("eval('[' * 10**6)", {End.EXITED, End.OUTPUT}),
    "write a core file": ("os.abort()", {End.EXITED}),
}
"""Programs that use up something, and the ways in which they may end under `LIMITS` of the test."""
