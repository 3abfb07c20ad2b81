"""What tests let worker processes do: one stage of a pipeline over links or over gloo, a whole training run, a command."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from patience import HANG, wait_until
from thinwire.cluster.neighbours import Neighbours
from thinwire.cluster.opening import Opened, open_stage
from thinwire.cluster.places import Places
from thinwire.cluster.scratch import free_ports
from thinwire.codecs.build import codec_defaults
from thinwire.config.sections import LinkConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from thinwire.link.endpoint import Endpoint
from thinwire.link.frame import Frame
from thinwire.link.identity import Identity
from thinwire.link.link import Link
from thinwire.link.peer import STANDBYS, Worker, WorkerId
from thinwire.link.roster import Roster
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stage
from thinwire.pipeline.engine import Engine
from thinwire.pipeline.engine_module import payloads_of
from thinwire.pipeline.inprocess import build_codec
from thinwire.pipeline.outcome import EVALUATION, Outcome
from thinwire.pipeline.own_engine import OwnExecutor
from thinwire.pipeline.schedule import depths
from thinwire.util.versions import choose_engine

CPU = torch.device("cpu")
EIGHT = ModelConfig(vocabulary=97, width=16, layers=8, heads=2, kv_heads=1, ffn=24, context=8)
BATCH, MICROBATCHES = 8, 4
OBJECT_CALLS = ("send_object_list", "recv_object_list", "broadcast_object_list", "all_gather_object")
FIRST_SAMPLE = 24
TORCH_ENGINE = choose_engine("auto", torch.__version__) == "torch"
"""Whether torch's pipeline engine is one that we run on."""


def run_config(stages: int, schedule: str, codec: dict, model: ModelConfig = EIGHT, dtype: str = "fp64", **link) -> RunConfig:
    """Describe a small pipeline."""
    options = codec_defaults(**{"dtype": dtype} | codec)
    return RunConfig(
        seed=3,
        device="cpu",
        model=model,
        train=TrainConfig(batch=BATCH, dtype=dtype, threads=1),
        pipeline=PipelineConfig(stages=stages, microbatches=MICROBATCHES, schedule=schedule),
        codec=options,
        link=LinkConfig(**link),
    )


def local_roster(identities: list[Identity], stages: int, standbys: int = 0) -> Roster:
    """Give each stage, and each standby behind them, a free port of the loopback address."""
    worker_ids = [*(WorkerId(0, stage) for stage in range(stages)), *(WorkerId(STANDBYS, number) for number in range(standbys))]
    workers = [
        Worker(worker_id, identity.certificate, f"127.0.0.1:{port}")
        for worker_id, identity, port in zip(worker_ids, identities, free_ports(len(worker_ids)), strict=False)
    ]
    return Roster.of(workers[:stages], workers[stages:])


def as_arrays(stage: torch.nn.Module) -> dict[str, np.ndarray]:
    """Return a stage's gradients by global name, in a form that travels through a pipe."""
    return {name: parameter.grad.numpy().copy() for name, parameter in stage.named_parameters() if parameter.grad is not None}


@contextlib.contextmanager
def no_objects() -> Iterator[None]:
    """Fail if torch sends or receives pickled objects."""
    with contextlib.ExitStack() as stack:
        for name in OBJECT_CALLS:
            stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(f"torch called {name}: it unpickles")))
        yield


@contextlib.contextmanager
def link_pipeline(config: RunConfig, index: int, roster: Roster, identity: Identity) -> Iterator[Opened]:
    """Open one stage over links; close it whatever happens."""
    neighbours = Neighbours(config, Places(roster), Endpoint(identity), WorkerId(0, index), "test")
    try:
        yield open_stage(config, neighbours)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        neighbours.close()


@contextlib.contextmanager
def gloo_engine(config: RunConfig, index: int, store: str) -> Iterator[Engine]:
    """Open one stage over gloo, which does not pack."""
    stages = config.pipeline.stages
    files = dist.FileStore(store, stages)
    dist.init_process_group("gloo", store=files, rank=index, world_size=stages, timeout=timedelta(seconds=HANG))
    try:
        codec = build_codec(config)
        stage = build_stage(config.model, cut_layers(config.model.layers, stages, config.pipeline.split), index, codec, config.seed)
        group = dist.distributed_c10d._get_default_group()
        engine = Engine(
            stage, payloads_of(stage, codec, BATCH // MICROBATCHES), group, BATCH // MICROBATCHES, MICROBATCHES, config.train.dtype
        )
        engine.rebuild(config.pipeline.schedule, depths(stages, MICROBATCHES))
        yield engine
        dist.barrier()
    finally:
        dist.destroy_process_group()


def step_over_links(
    config: RunConfig,
    index: int,
    roster: Roster,
    identity: Identity,
    ids_BT1: np.ndarray,
    steps: int = 1,
    in_flight: list[int] | None = None,
) -> dict:
    """Do steps of one stage over links, if wanted so deep; return the last loss, all gradients, and how torch agreed on shapes."""
    with no_objects(), link_pipeline(config, index, roster, identity) as opened:
        pipeline = opened.compute
        if in_flight is not None:
            pipeline.engine.rebuild("depth", in_flight)
        for step in range(steps):
            loss = pipeline.step(torch.from_numpy(ids_BT1) if index == 0 else None, step, FIRST_SAMPLE)
        return {"loss": loss, "gradients": as_arrays(pipeline.stages[0]), "mode": inference_mode(pipeline.engine)}


def step_over_gloo(config: RunConfig, index: int, store: str, ids_BT1: np.ndarray, steps: int = 1) -> dict:
    """Do the same over gloo."""
    with no_objects(), gloo_engine(config, index, store) as engine:
        for step in range(steps):
            loss = engine.step(torch.from_numpy(ids_BT1) if index == 0 else None, step, FIRST_SAMPLE)
        return {"loss": loss, "gradients": as_arrays(engine.stage), "mode": inference_mode(engine)}


def inference_mode(engine: Engine) -> str:
    """Name the way in which torch's stage learnt its shapes; our own engine is told them."""
    if isinstance(engine.executor, OwnExecutor):
        return "STATIC"
    schedule = engine.executor.schedule
    stage = schedule._stages[0] if hasattr(schedule, "_stages") else schedule._stage
    return stage._inference_mode.name


def evaluate_over_links(config: RunConfig, index: int, roster: Roster, identity: Identity, batches: list[np.ndarray]) -> dict:
    """Evaluate batches between steps on the second of them; return their losses, the gradients and the payload bytes counted."""
    with link_pipeline(config, index, roster, identity) as opened:
        pipeline, losses = opened.compute, []
        for number, batch_BT1 in enumerate(batches):
            loss = pipeline.evaluate(torch.from_numpy(batch_BT1) if index == 0 else None, len(batch_BT1))
            losses.append(opened.group.settle(Outcome(EVALUATION, loss, 0.0)).loss)
            pipeline.step(torch.from_numpy(batches[1]) if index == 0 else None, number, FIRST_SAMPLE)
        return {
            "losses": losses,
            "gradients": as_arrays(pipeline.stages[0]),
            "bytes": [part["boundary"] for part in pipeline.totals()],
        }


def train_stage(config: RunConfig, index: int, roster: Roster, identity: Identity, folder: Path, resets: bool = False) -> dict:
    """Train one stage to the end, if wanted with links that break all the time; return the summary and the reconnections."""
    from thinwire.run.agree import Start, agree
    from thinwire.run.trainer import Trainer

    with link_pipeline(config, index, roster, identity) as opened:
        with _resets([port.link for port in opened.compute.ports.values()], index) if resets else contextlib.nullcontext():
            trainer = Trainer(config, folder, opened.compute, opened.group)
            agree(trainer, Start())
            summary = trainer.run()
        return {"summary": summary, "reconnects": [link["reconnects"] for link in opened.compute.totals()[0]["links"]]}


def _resets(links: list[Link], seed: int) -> AbstractContextManager:
    """Break a random one of this stage's connections behind every third frame or so, while the I/O threads are at work on it."""
    generator, send = random.Random(seed), Link.send

    def sent(self: Link, frame: Frame, timeout: float | None = None) -> None:
        send(self, frame, timeout)
        if generator.random() < 0.3:
            generator.choice(links).reset_connection()

    return mock.patch.object(Link, "send", sent)


def command(words: list[str], interrupt: Path | None = None) -> tuple[int, str, str]:
    """Run a thinwire command; return its exit code and what it printed. Press Ctrl-C once the file `interrupt` has something in it."""
    from thinwire.cli import main as cli

    out, error = io.StringIO(), io.StringIO()
    if interrupt is not None:
        threading.Thread(target=_press, args=(interrupt,), daemon=True).start()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = cli.main(words)
    return code, out.getvalue(), error.getvalue()


def _press(path: Path) -> None:
    wait_until(lambda: path.exists() and path.stat().st_size)
    os.kill(os.getpid(), signal.SIGINT)
