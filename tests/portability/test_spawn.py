"""Workers where there is no server to fork from: nobody takes one for silent that still imports torch."""

from __future__ import annotations

import multiprocessing
import time
from types import SimpleNamespace

import pytest

from runs import train
from thinwire.cluster import supervisor
from thinwire.cluster.children import Child
from thinwire.config.sections import RunConfig
from thinwire.link.peer import WorkerId


@pytest.fixture
def spawning(monkeypatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])


def test_a_worker_has_no_limit_until_its_first_sign_of_life(spawning, tmp_path):
    watching = supervisor.Supervisor(print, RunConfig(), {}, tmp_path, lambda worker_id, message: None, None)
    assert watching.context.get_start_method() == "spawn"
    child = Child(WorkerId(0, 0), None, SimpleNamespace(poll=lambda: False))
    watching.children.append(child)
    watching.looked_at = time.monotonic()
    watching._end_silent()
    assert child.failure is None and child.heard_at is None
    child.heard_at = time.monotonic() - 2 * watching.config.link.silent_seconds
    watching._end_silent()
    assert "no sign of life" in child.failure.text


def test_one_that_was_asked_to_end_at_once_has_a_limit(spawning, tmp_path):
    watching = supervisor.Supervisor(print, RunConfig(), {}, tmp_path, lambda worker_id, message: None, None)
    child = Child(WorkerId(0, 0), None, SimpleNamespace(poll=lambda: False, send_bytes=lambda data: None))
    watching.children.append(child)
    watching._pass_on("soon")
    assert child.heard_at is None
    watching._pass_on("now")
    assert child.heard_at is not None


@pytest.mark.full
def test_a_lost_worker_is_replaced(spawning, config, tmp_path, monkeypatch):
    """Once, at its third step: the weights are those of an undisturbed run."""
    killed, hear = [], supervisor.Supervisor._hear

    def strike(self, worker_id, message):
        hear(self, worker_id, message)
        if message.get("step") == 3 and worker_id.stage == 1 and not killed:
            killed.append(worker_id)
            self.children[1].process.kill()

    usual = train(config, tmp_path / "usual")
    monkeypatch.setattr(supervisor.Supervisor, "_hear", strike)
    struck = train(config, tmp_path / "run", "--pipeline.mode", "workers")
    assert killed and struck["weights_sha256"] == usual["weights_sha256"] and struck["steps"] == 6
