"""A transport from outside the package, one file and one entry point: two workers train over it, and end with the bits of one process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import HANG
from runs import train
from thinwire.cli import main as cli

HERE = Path(__file__).parent


@pytest.fixture
def installed(tmp_path, monkeypatch) -> None:
    """Put the file and its entry point where this process and those it starts find packages."""
    folder = tmp_path / "packages"
    facts = folder / "unix_transport-1.0.dist-info"
    facts.mkdir(parents=True)
    shutil.copy(HERE / "unix_transport.py", folder)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: unix-transport\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[thinwire.transports]\nunix = unix_transport:UnixTransport\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Make a folder with a short name: the path of a socket has about a hundred characters at most."""
    with tempfile.TemporaryDirectory(prefix="tw-") as folder:
        yield Path(folder)


def roster(folder: Path, *addresses: str) -> int:
    """Make an identity for each address, and try to write a roster of them."""
    entries = []
    for stage, address in enumerate(addresses):
        if not (folder / f"keys-{stage}").exists():
            assert cli.main(["keys", str(folder / f"keys-{stage}"), "--name", f"machine-{stage}"]) == 0
        entries += ["--stage", f"{address}={folder / f'keys-{stage}' / 'certificate.pem'}"]
    return cli.main(["roster", str(folder / "roster.toml"), *entries])


def test_two_workers_train_over_it(config, tmp_path, installed, sockets):
    alone = train(config, tmp_path / "alone")
    assert roster(tmp_path, f"unix://{sockets / 'first'}", f"unix://{sockets / 'second'}") == 0
    words = [sys.executable, "-m", "thinwire", "join", str(tmp_path / "roster.toml"), "--config", config, "--train.threads", "1"]
    workers = [
        subprocess.Popen(
            [*words, "--stage", str(stage), "--keys", str(tmp_path / f"keys-{stage}"), "--run", str(tmp_path / f"run-{stage}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stage in range(2)
    ]
    try:
        said = [worker.communicate(timeout=HANG) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], said
    summary = json.loads((tmp_path / "run-0" / "summary.json").read_text())
    assert summary["weights_sha256"] == alone["weights_sha256"] and summary["final_loss"] == alone["final_loss"]
    assert (sockets / "first").is_socket(), "the lower stage listens, at the address of the roster and not over TCP"


@pytest.mark.parametrize(
    "address, reason",
    [
        ("unxi:///tmp/a", r"'unxi:///tmp/a' is of an unknown transport; known are tcp, unix: install"),
        ("unix://", "'unix://' has no place behind ://"),
        ("tcp://127.0.0.1:29400", "is not host:port"),
    ],
)
def test_an_address_that_no_transport_has_is_refused(tmp_path, installed, capsys, address, reason):
    assert roster(tmp_path, address, "127.0.0.1:29400") == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not (tmp_path / "roster.toml").exists()
