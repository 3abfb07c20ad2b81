"""Make Python on Linux lack what it lacks on macOS; loaded first by every process that finds it in its path."""

from __future__ import annotations

import os
import select
import socket

MISSING = {
    os: "posix_fadvise posix_fallocate fdatasync O_DIRECT O_TMPFILE sched_getaffinity sched_setaffinity pipe2 eventfd memfd_create",
    socket: "TCP_CONGESTION TCP_NOTSENT_LOWAT TCP_USER_TIMEOUT TCP_INFO SOCK_NONBLOCK SOCK_CLOEXEC",
    select: "epoll",
}

for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
