"""`thinwire keys`, `roster` and `join`: workers that share nothing but the roster and the config."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path as File

import pytest

from faults.by_hand import Hand, ended, signal_to
from jobs import command
from patience import HANG, wait_until
from runs import train
from testbed import Path, Testbed, obstacle
from thinwire.cli import main as cli
from thinwire.cluster.scratch import free_ports


def reachable(address: str) -> bool:
    """Tell whether this machine can listen on an address (127.0.0.2 needs setting up on some systems)."""
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return False
    return True


def machines(folder: File, addresses: list[str]) -> list[File]:
    """Make one folder per machine, with keys of its own and the roster that all have."""
    homes = [folder / f"machine-{number}" for number in range(len(addresses))]
    entries: list[str] = []
    for home, address in zip(homes, addresses, strict=True):
        home.mkdir()
        assert cli.main(["keys", str(home / "keys"), "--name", home.name]) == 0
        entries += ["--stage", f"{address}={home / 'keys/certificate.pem'}"]
    assert cli.main(["roster", str(folder / "roster.toml"), *entries]) == 0
    for home in homes:
        shutil.copy(folder / "roster.toml", home / "roster.toml")
    return homes


def join_words(home: File, stage: int, config: str, *words: str) -> list[str]:
    """Return the words that a person types on a machine; its run folder and cache are its own."""
    shutil.copy(config, home / "tiny.toml")
    own = ["--stage", str(stage), "--keys", str(home / "keys"), "--run", str(home / "run"), "--data.cache", str(home / "cache")]
    return ["join", str(home / "roster.toml"), "--config", str(home / "tiny.toml"), *own, "--train.threads", "1", *words]


def loopback(tmp_path: File, stages: int = 2) -> list[File]:
    return machines(tmp_path, [f"127.0.0.1:{port}" for port in free_ports(stages)])


def assert_same(home: File, alone: dict) -> dict:
    summary = json.loads((home / "run/summary.json").read_text())
    assert summary["weights_sha256"] == alone["weights_sha256"] and summary["model_sha256"] == alone["model_sha256"]
    assert summary["final_loss"] == alone["final_loss"]
    return summary


def finish(processes: list[subprocess.Popen]) -> list[str]:
    """Wait for joins and return what they printed; end all of them if one fails."""
    try:
        outputs = [process.communicate(timeout=HANG) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


def assert_nothing_shared(homes: list[File], outputs: list[str]) -> None:
    """Each machine has said that it is done, and keeps its own stage and no other; only stage 0 has read data."""
    for stage, home in enumerate(homes):
        assert f"stage {stage} done: validation loss" in outputs[stage]
        names = {path.name for path in (home / "run/checkpoints/step-000006").iterdir()}
        assert names == {f"stage-{stage}.json", f"stage-{stage}.safetensors"}
        assert (home / "cache").exists() == (stage == 0)


@pytest.mark.skipif(obstacle() is not None, reason=obstacle() or "")
def test_two_machines_in_network_namespaces(config, tmp_path):
    """Real processes, each with a network of its own; the second has no address and only dials out."""
    alone = train(config, tmp_path / "alone")
    with Testbed([Path(rate_mbps=50, delay_ms=2)]) as bed:
        homes = machines(tmp_path, [f"{bed.address(0, towards=1)}:29400", "none"])
        processes = [
            bed.popen(
                stage,
                [sys.executable, "-m", "thinwire", *join_words(homes[stage], stage, config)],
                cwd=homes[stage], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for stage in range(2)
        ]  # fmt: skip
        outputs = finish(processes)
    assert_same(homes[0], alone)
    assert_nothing_shared(homes, outputs)


@pytest.mark.skipif(not (reachable("127.0.0.2") and reachable("127.0.0.3")), reason="this system has one loopback address")
def test_two_machines_on_loopback_addresses(config, tmp_path, pool):
    alone = train(config, tmp_path / "alone")
    homes = machines(tmp_path, [f"{host}:{port}" for host, port in zip(("127.0.0.2", "127.0.0.3"), free_ports(2), strict=True)])
    results = pool.run(command, [(join_words(home, stage, config),) for stage, home in enumerate(homes)])
    assert [code for code, _, _ in results] == [0, 0], results
    assert_same(homes[0], alone)
    assert_nothing_shared(homes, [out for _, out, _ in results])


def test_resume_where_each_machine_has_only_its_own_checkpoints(config, tmp_path, pool):
    alone = train(config, tmp_path / "alone", "--pipeline.stages", "3")
    homes = loopback(tmp_path, 3)
    words = [join_words(home, stage, config, "--pipeline.stages", "3") for stage, home in enumerate(homes)]
    assert [code for code, _, _ in pool.run(command, [(each,) for each in words])] == [0, 0, 0]
    assert_same(homes[0], alone)
    # one machine went down before it wrote its last checkpoint: all must go back to the one before
    shutil.rmtree(homes[1] / "run/checkpoints/step-000006")
    shutil.rmtree(homes[2] / "run/copies/step-000006")
    results = pool.run(command, [([*each, "--resume"],) for each in words])
    assert [code for code, _, _ in results] == [0, 0, 0], results
    assert assert_same(homes[0], alone)["steps"] == 6
    assert (homes[1] / "run/checkpoints/step-000006/stage-1.json").exists()


def test_a_different_config_is_refused_on_both_sides_by_name(config, tmp_path, pool):
    homes = loopback(tmp_path)
    words = [join_words(homes[0], 0, config), join_words(homes[1], 1, config, "--train.rate", "0.001")]
    for code, _, error in pool.run(command, [(each,) for each in words]):
        assert code == 2 and error.startswith("thinwire: error: ")
        assert "config train.rate" in error and "0.003" in error and "0.001" in error
    assert not (homes[0] / "run").exists() and not (homes[1] / "run").exists()


def test_local_settings_may_differ(config, tmp_path, pool):
    homes = loopback(tmp_path)
    words = [join_words(homes[0], 0, config), join_words(homes[1], 1, config, "--link.silent_seconds", "20", "--link.ping_seconds", "2")]
    results = pool.run(command, [(each,) for each in words])
    assert [code for code, _, _ in results] == [0, 0], results
    assert_same(homes[0], train(config, tmp_path / "alone"))


def test_the_keys_of_another_stage_are_refused_at_once(config, tmp_path, capsys):
    homes = loopback(tmp_path)
    words = join_words(homes[0], 1, config)
    assert cli.main(words) == 2
    assert "the roster's certificate for replica 0 stage 1 is not that of" in capsys.readouterr().err


def test_a_stranger_with_a_roster_of_its_own_is_refused_by_the_peer(config, tmp_path):
    """Stage 1's machine made new keys and put them into its own copy of the roster only."""
    homes = loopback(tmp_path)
    (tmp_path / "other").mkdir()
    stranger = loopback(tmp_path / "other")[1]
    certificate = [home / "keys/certificate.pem" for home in (homes[1], stranger)]
    text = (homes[0] / "roster.toml").read_text()
    assert text.count(certificate[0].read_text().strip()) == 1
    (stranger / "roster.toml").write_text(text.replace(certificate[0].read_text().strip(), certificate[1].read_text().strip()))
    words = [join_words(homes[0], 0, config, "--link.reconnect_seconds", "300"), join_words(stranger, 1, config)]
    with Hand(tmp_path) as hand:
        waiting, refused = (hand.start(each, name) for each, name in zip(words, ("waiting", "refused"), strict=True))
        assert ended(refused) == 2
        reason = hand.printed("refused")[1]
        assert "refused this worker" in reason and "certificate" in reason
        assert waiting.exitcode is None  # for the true one


@pytest.mark.parametrize("stage", [0, 1])
def test_a_peer_that_never_comes(config, tmp_path, pool, stage):
    """Stage 0 waits for a call, stage 1 calls an address where nobody is."""
    home = loopback(tmp_path)[stage]
    ((code, _, error),) = pool.run(command, [(join_words(home, stage, config, "--link.reconnect_seconds", "2"),)])
    assert code == 2 and "Traceback" not in error
    assert f"no connection to replica 0 stage {1 - stage} for 2.0 s" in error
    assert ("start the worker there" if stage else "check that it runs") in error and "--link.reconnect_seconds" in error


def test_ctrl_c_on_one_machine_stops_both_and_says_how_to_go_on(config, tmp_path, pool):
    homes = loopback(tmp_path)
    words = [join_words(home, stage, config, "--train.steps", "100000") for stage, home in enumerate(homes)]
    interrupted = homes[1] / "run/metrics/stage-1.jsonl"
    (code, out, _), (other, _, _) = pool.run(command, [(words[1], interrupted), (words[0],)])
    assert (code, other) == (0, 0)
    assert f"go on with: thinwire join {homes[1] / 'roster.toml'} --stage 1" in out and "--resume" in out
    steps = json.loads((homes[0] / "run/summary.json").read_text())["steps"]
    assert 1 <= steps < 100000 and (homes[1] / f"run/checkpoints/step-{steps:06d}/stage-1.json").exists()


def start_join(words: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "thinwire", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_lost_machine_is_replaced_from_its_neighbours_copy(config, tmp_path):
    """A machine dies with its disk; another one with its keys takes its place and gets the stage's checkpoint from the neighbour."""
    words = ["--pipeline.stages", "3", "--train.steps", "40", "--train.checkpoint_every", "5", "--train.validate_every", "0"]
    alone = train(config, tmp_path / "alone", *words)
    homes = loopback(tmp_path, stages=3)
    lines = [join_words(home, stage, config, *words, "--link.reconnect_seconds", "300") for stage, home in enumerate(homes)]
    with Hand(tmp_path) as hand:
        running = [hand.start(line, f"stage-{stage}", hold=20 if stage == 1 else None) for stage, line in enumerate(lines)]
        hand.await_hold("stage-1")
        wait_until(lambda: list((homes[2] / "run/copies").glob("step-*/stage-1.json")))
        signal_to(running[1], signal.SIGKILL)
        running[1].join()
        shutil.rmtree(homes[1] / "run")
        running[1] = hand.start(lines[1], "another")
        assert [ended(process) for process in running] == [0, 0, 0], [hand.printed(name) for name in ("stage-0", "another", "stage-2")]
    assert_same(homes[0], alone)
    assert (homes[1] / "run/checkpoints/step-000040/stage-1.json").exists()
    first = json.loads((homes[1] / "run/metrics/stage-1.jsonl").read_text().splitlines()[0])
    assert first["step"] > 5  # not from the beginning


@pytest.mark.full
def test_two_replicas_on_four_machines(config, tmp_path):
    """Each machine has keys and a folder of its own; the grid computes what it computes on one machine."""
    homes = loopback(tmp_path, 4)
    ports = free_ports(4)
    entries = [f"127.0.0.1:{port}={home / 'keys/certificate.pem'}" for port, home in zip(ports, homes, strict=True)]
    entries = [word for entry in entries for word in ("--stage", entry)]
    assert cli.main(["roster", str(tmp_path / "grid.toml"), "--replicas", "2", *entries]) == 0
    grid = ("--replicas.count", "2", "--train.batch", "8", "--replicas.exchange", "powersgd:rank=2")
    processes = []
    for number, home in enumerate(homes):
        shutil.copy(tmp_path / "grid.toml", home / "roster.toml")
        replica, stage = divmod(number, 2)
        processes.append(start_join(join_words(home, stage, config, "--replica", str(replica), *grid)))
    finish(processes)
    together = train(config, tmp_path / "together", "--pipeline.mode", "workers", *grid)
    summary = json.loads((homes[0] / "run/summary.json").read_text())
    assert summary["weights_sha256"] == together["weights_sha256"] and len(summary["weights_sha256"]) == 4
