"""Make Python on Linux lack what it lacks on Windows, and refuse what that refuses; every process that finds it in its path loads it first.

It is a shim, not Windows: `os.name` and the separators of paths stay, because the standard library is that of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import multiprocessing.context
import multiprocessing.popen_fork
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types

OPEN, CLOSE, REPLACE, UNLINK, FSYNC = os.open, os.close, os.replace, os.unlink, os.fsync
FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]')
TEMPORARY_FILES: dict[int, str] = {}


class InUse(PermissionError):
    """What Windows says when someone has a file open."""

    winerror = 32


def is_in_use(path: object) -> bool:
    """Tell whether this process has a file, or one below a folder, open or mapped."""
    real = os.path.realpath(os.fspath(path))  # type: ignore[call-overload]
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    with open("/proc/self/maps", encoding="utf-8") as maps:
        found += [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line]
    return any(each == real or each.startswith(f"{real}/") for each in found)


def refuse_in_use(path: object) -> None:
    if os.path.exists(path) and is_in_use(path):  # type: ignore[arg-type]
        raise InUse(errno.EACCES, "The process cannot access the file because it is being used by another process", path)


def open_file(path, flags, mode=0o777, *, dir_fd=None):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    if FORBIDDEN.search(os.path.basename(os.fspath(path))):
        raise OSError(errno.EINVAL, "Invalid argument", path)
    number = OPEN(path, flags & ~(os.O_TEMPORARY | os.O_BINARY), 0o666)
    if flags & os.O_TEMPORARY:
        TEMPORARY_FILES[number] = os.fspath(path)
    return number


def close_file(number):
    CLOSE(number)
    if number in TEMPORARY_FILES:
        UNLINK(TEMPORARY_FILES.pop(number))


def replace(source, target):
    refuse_in_use(source)
    refuse_in_use(target)
    REPLACE(source, target)


def rename(source, target):
    if os.path.exists(target):
        raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", target)
    replace(source, target)


def unlink(path, *, dir_fd=None):
    refuse_in_use(path)
    UNLINK(path)


def fsync(number):
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    FSYNC(number)


def locking(handle, mode, count):
    """Lock bytes from the present position on, as msvcrt does: for this process's other handles too."""
    place = os.lseek(handle, 0, os.SEEK_CUR)
    assert (mode, place, count) == (2, 1 << 20, 1), "not the byte that nobody reads"
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def socketpair(family=socket.AF_INET, type=socket.SOCK_STREAM, proto=0):
    """Connect two sockets over the loopback address, as the standard library does there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    return one, two


def take_away() -> None:
    """Remove names that are not there on Windows."""
    missing = {
        os: "fork forkpty getuid geteuid getgid getegid getgroups getppgid getpgid setsid killpg nice getloadavg sysconf statvfs fstatvfs "
        "sched_getaffinity sched_setaffinity pread pwrite preadv pwritev readv writev posix_fadvise posix_fallocate fdatasync fchmod "
        "fchown chown mkfifo mknod openpty O_NOFOLLOW O_NONBLOCK O_TMPFILE O_DIRECT O_DIRECTORY O_CLOEXEC O_SYNC O_DSYNC sendfile sync",
        signal: "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGSTOP SIGCONT SIGALRM SIGCHLD SIGPIPE SIGQUIT alarm setitimer pause pthread_kill",
        socket: "AF_UNIX SO_REUSEPORT TCP_CONGESTION TCP_NOTSENT_LOWAT TCP_USER_TIMEOUT TCP_INFO",
        select: "epoll poll",
    }
    for module, names in missing.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in ("fcntl", "termios", "resource", "pwd", "grp", "multiprocessing.forkserver"):
        sys.modules[name] = None  # type: ignore[assignment]
    del multiprocessing.context.ForkServerContext
    multiprocessing.context._concrete_contexts.pop("forkserver")
    multiprocessing.context._concrete_contexts.pop("fork")
    default = multiprocessing.context._default_context
    default._default_context = multiprocessing.context._concrete_contexts["spawn"]
    default.get_all_start_methods = lambda: ["spawn"]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]


def put_in() -> None:
    """Add names that are only there on Windows, and calls that refuse what Windows refuses."""
    os.O_TEMPORARY, os.O_BINARY = 0x4000_0000, 0x2000_0000
    os.open, os.close, os.replace, os.rename, os.unlink, os.remove, os.fsync = open_file, close_file, replace, rename, unlink, unlink, fsync
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)  # type: ignore[assignment]
    signal.SIGBREAK = signal.Signals(21)  # that number, of another signal here
    ctypes.windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(SetConsoleCtrlHandler=lambda handler, add: 1))
    ctypes.WINFUNCTYPE = ctypes.CFUNCTYPE
    socket.socketpair = socketpair
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile
    multiprocessing.popen_fork.Popen.kill = lambda self: self._send_signal(9)  # the name is gone, the deed is Windows' TerminateProcess
    shutil._use_fd_functions = False
    subprocess._USE_VFORK = subprocess._USE_POSIX_SPAWN = False


put_in()
take_away()
