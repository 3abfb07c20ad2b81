"""Named network namespaces: make, configure, empty, delete, and find those a dead run has left.

A name says whose it is: thinwire-<pid>-<start of that process in clock ticks>-<token>-<host>, so that `clean` never touches a living run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

PREFIX = "thinwire"
COMMAND_SECONDS = 20
EMPTY_SECONDS = 5.0


def obstacle() -> str | None:
    """Say why no testbed can run here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "the testbed makes network namespaces and needs root: run it with sudo"
    if shutil.which("ip") is None:
        return "the command `ip` is missing: apt-get install iproute2"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing: modprobe tun"
    return None


def ip(*arguments: str) -> str:
    """Run iproute2 and return what it prints."""
    # A session of its own: Ctrl-C must not stop a teardown half-way.
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_SECONDS, start_new_session=True)
    if done.returncode:
        raise ValueError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}; does this machine allow network namespaces?")
    return done.stdout


def started_ticks(pid: int) -> str | None:
    """Return when a process started, or None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def names(hosts: int) -> list[str]:
    """Choose the names of a new bed's namespaces."""
    bed = f"{PREFIX}-{os.getpid()}-{started_ticks(os.getpid())}-{secrets.token_hex(2)}"
    return [f"{bed}-{host}" for host in range(hosts)]


def existing() -> list[str]:
    """List the namespaces of every bed, living or stale."""
    return [name for line in ip("netns", "list").splitlines() if (name := line.split()[0]).startswith(f"{PREFIX}-")]


def exists(name: str) -> bool:
    return Path(f"/run/netns/{name}").exists()


def stale() -> list[str]:
    """List those whose owner is dead."""
    found = []
    for name in existing():
        fields = name.split("-")
        if len(fields) == 5 and fields[1].isdigit() and started_ticks(int(fields[1])) != fields[2]:
            found.append(name)
    return found


def set_sysctls(namespace: str, settings: Mapping[str, str]) -> None:
    """Set kernel parameters; those of `net` belong to the namespace alone."""
    for name, value in settings.items():
        if not name.startswith("net."):
            raise ValueError(f"the kernel parameter {name} is not one of a network namespace; those start with `net.`")
        target = "/proc/sys/" + name.replace(".", "/")
        writer = ["ip", "netns", "exec", namespace, "dd", "status=none", f"of={target}"]  # dd names the kernel's reason, a shell does not
        done = subprocess.run(writer, input=value, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        if done.returncode:
            raise ValueError(f"cannot set {name} to {value!r} in a network namespace: {done.stderr.strip()}")


def processes(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace).split()]


def remove(namespace: str) -> None:
    """Kill every process in a namespace and delete it."""
    deadline = time.monotonic() + EMPTY_SECONDS
    while (living := processes(namespace)) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    ip("netns", "delete", namespace)
    if living:
        raise RuntimeError(f"processes {living} in the deleted namespace {namespace} do not end; look at them with `ps`")
