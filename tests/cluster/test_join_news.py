"""What `thinwire join` tells the people at each machine, as plain lines: real processes, stopped, killed and refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.test_join import join_words
from jobs import command
from patience import HANG
from thinwire.cli import main as cli
from thinwire.cluster.scratch import free_ports

NAMES = ("attic", "barn")
QUICK = ("--link.ping_seconds", "0.2", "--link.silent_seconds", "2", "--train.validate_every", "0")


def named_machines(folder: Path) -> list[Path]:
    """Make two machines that have names; the second only dials out."""
    homes = [folder / name for name in NAMES]
    entries: list[str] = []
    for home, address in zip(homes, (f"127.0.0.1:{free_ports(1)[0]}", "none"), strict=True):
        home.mkdir()
        assert cli.main(["keys", str(home / "keys")]) == 0
        entries += ["--stage", f"{address}={home / 'keys/certificate.pem'},name={home.name}"]
    assert cli.main(["roster", str(folder / "roster.toml"), *entries]) == 0
    for home in homes:
        (home / "roster.toml").write_bytes((folder / "roster.toml").read_bytes())
    return homes


class Machine:
    """One join whose output goes to a file."""

    def __init__(self, words: list[str], path: Path) -> None:
        self.path = path
        with path.open("wb") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "thinwire", *words], stdout=file, stderr=subprocess.STDOUT)

    def hear(self, pattern: str, since: int = 0) -> int:
        """Wait until it says something, behind this many letters; return where that ends."""
        deadline = time.monotonic() + 120
        while not (match := re.search(pattern, self.text[since:])):
            assert time.monotonic() < deadline, f"{pattern!r} is not in:\n{self.text[since:]}"
            time.sleep(0.05)
        return since + match.end()

    @property
    def text(self) -> str:
        return self.path.read_text()


@contextmanager
def ending(machines: list[Machine]) -> Iterator[None]:
    try:
        yield
    finally:
        for machine in machines:
            machine.process.kill()
            machine.process.wait()


def test_everything_that_happens_is_told_by_name(config, tmp_path):
    homes = named_machines(tmp_path)
    lines = [join_words(home, stage, config, "--train.steps", "100000", *QUICK) for stage, home in enumerate(homes)]
    attic = Machine(lines[0], tmp_path / "attic.txt")
    machines = [attic]
    with ending(machines):
        at = attic.hear(r"listening on 127\.0\.0\.1:\d+\n")
        at = attic.hear(r"waiting for barn \(stage 1\), which dials in here; giving up in \d+:\d\d\n", at)
        barn = Machine(lines[1], tmp_path / "barn.txt")
        machines.append(barn)
        attic.hear(r"connected to barn \(stage 1\), round trip [\d.]+ ms\n", at)
        attic.hear(r"the line to barn \(stage 1\): [\d.,]+ Mbit/s, round trip [\d.]+ ms\n", at)
        at = attic.hear(r"tokenising data\.source .*: once, it is kept in ", at)
        at = attic.hear(r"corpus: [\d,]+ training tokens; 100,000 steps of 64 tokens read it [\d.]+ times\nwarning: ", at)
        barn.hear(r"connected to attic \(stage 0\), round trip")
        barn.hear(r"waiting for attic \(stage 0\) to read the data\n")
        at = attic.hear(r"step \d+/100000  loss", at)
        barn.process.send_signal(signal.SIGSTOP)
        at = attic.hear(r"no word from barn \(stage 1\) since \d\d:\d\d:\d\d.*; giving up in \d+:\d\d\n", at)
        barn.process.send_signal(signal.SIGCONT)
        at = attic.hear(r"barn \(stage 1\) is back after \d+:\d\d\n", at)
        at = attic.hear(r"step \d+/100000  loss", at)
        barn.process.kill()
        barn.process.wait()
        barn = Machine([*lines[1], "--resume"], tmp_path / "barn2.txt")
        machines.append(barn)
        at = attic.hear(r"step \d+ is given up: barn \(stage 1\) ", at)
        at = attic.hear(r"all stages go on from step \d+", at)
        barn.hear(r"all stages go on from step \d+\n")
        at = attic.hear(r"step \d+/100000  loss", at)
        os.kill(barn.process.pid, signal.SIGINT)
        assert [machine.process.wait(HANG) for machine in (attic, barn)] == [0, 0]
    barn.hear("stopping after the step under way; Ctrl-C again ends at once\n")
    attic.hear(r"stopping after step \d+: barn \(stage 1\) was asked to stop\n", at)
    for machine, times in ((attic, "twice "), (barn, "")):  # nobody has pressed it in the attic yet
        stopped = machine.hear(rf"step (\d+) is kept in .*; validating, Ctrl-C {times}leaves that out\n")
        stopped = machine.hear(r"stage \d done: validation loss", stopped)
        machine.hear(r"stopped at step \d+; kept: .*\ngo on with: thinwire join .* --resume\n", stopped)
        assert "Traceback" not in machine.text
    assert same_bytes(attic.text) == same_bytes(barn.text) > 0  # the last stage has no boundary behind it


def same_bytes(text: str) -> float:
    return float(re.findall(r"([\d.]+) bytes/token", text)[-1])


def test_the_reason_travels_to_the_other_machine(config, tmp_path, pool):
    """Stage 0 finds out only when it reads them that its data are no text: both sides say so, by name."""
    homes = named_machines(tmp_path)
    source = tmp_path / "text.txt"
    source.write_bytes(source.read_bytes() + b"\xff\xfe")
    words = [join_words(home, stage, config, "--link.reconnect_seconds", "3") for stage, home in enumerate(homes)]
    results = pool.run(command, [(each,) for each in words])
    for code, out, error in results:
        assert code == 2 and "is not UTF-8 text" in out + error and "iconv" in out + error
        assert "has closed the link" not in out + error and "Traceback" not in error
    assert "attic (stage 0)" in results[1][1] + results[1][2]


def test_what_a_machine_lacks_is_found_before_it_meets_anyone(config, tmp_path, capsys):
    home = named_machines(tmp_path)[0]
    capsys.readouterr()
    assert cli.main(join_words(home, 0, config, "--data.source", "nowhere/*.txt")) == 2
    printed = capsys.readouterr()
    assert "nowhere/*.txt' matches no file" in printed.err and "listening" not in printed.out
