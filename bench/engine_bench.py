"""Shared by the engine's benches: workers with emulated compute in the hosts of a testbed, and the form of the results.

A bench calls `run_sides`. In each host this file is started as a program: `python bench/engine_bench.py ORDER`, ORDER being an `Order` in
JSON. Compute is a sleep, so all hosts fit on one machine; links, backend, stage and schedule are the real ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import thinwire.cluster.neighbours as neighbours
from testbed import Path, Testbed
from thinwire.cluster.places import Places
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import ModelConfig, PipelineConfig, RunConfig, TrainConfig
from thinwire.link.endpoint import Endpoint
from thinwire.link.identity import load_identity, make_identity
from thinwire.link.options import LinkOptions
from thinwire.link.peer import Worker, WorkerId
from thinwire.link.roster import Roster, read_roster, write_roster
from thinwire.model.cut import StagePlan
from thinwire.model.stage import PLAIN
from thinwire.pipeline.backend import Port, boundary_form, boundary_port, close_group, open_group
from thinwire.pipeline.engine import Engine
from thinwire.pipeline.engine_module import payloads_of
from thinwire.pipeline.schedule import depths
from thinwire.pipeline.torch_engine import TorchExecutor, static_stage

RESULTS = File(__file__).with_name("results")
PORT = 29500
CONTEXT = 100


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the worker of a host does."""

    stages: int
    microbatches: int
    payload_bytes: int
    rate_mbps: float
    rtt_ms: float
    forward_seconds: float = 0.05
    backward_seconds: float = 0.1
    sides: tuple[str, ...] = ("thinwire",)
    """`thinwire`, `thinwire-bbr`, `thinwire-cubic` (congestion control), `gloo-1f1b`, `gloo-interleaved`."""
    steps: int = 3
    """Timed steps of each side, after two of warm-up."""
    stage: int = 0
    folder: str = ""
    interface: str = ""

    @property
    def delay_seconds(self) -> float:
        """One-way delay and frame time."""
        return self.rtt_ms / 2e3 + self.payload_bytes * 8e-6 / self.rate_mbps

    @property
    def bound_seconds(self) -> float:
        """The least time of a step with any synchronous schedule: (M + S - 1)(f + b) + 2 (S - 1)(one-way delay + frame time)."""
        compute = self.forward_seconds + self.backward_seconds
        return (self.microbatches + self.stages - 1) * compute + 2 * (self.stages - 1) * self.delay_seconds


class Nap(torch.autograd.Function):
    """Take as long as a stage's forward and backward would."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.seconds = backward_seconds
        time.sleep(forward_seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class NappingStage(nn.Module):
    """Stand in for a `Stage`: the same payload, no arithmetic."""

    runner = PLAIN

    def __init__(self, model: ModelConfig, order: Order) -> None:
        super().__init__()
        self.model, self.order = model, order
        self.plan = StagePlan(order.stage, order.stages, range(order.stage, order.stage + 1))
        self.weight = nn.Parameter(torch.zeros(1, model.context, model.width))
        self.device, self.dtype = self.weight.device, self.weight.dtype

    def forward(self, ids_BT1: Tensor, payload: tuple[Tensor, ...], context: Any) -> tuple[Tensor, ...]:
        values = self.weight + payload[0].float() if payload else self.weight
        values = Nap.apply(values, self.order.forward_seconds, self.order.backward_seconds)
        return (values.mean(),) if self.plan.last else (values.bfloat16(),)


def run_config(order: Order) -> RunConfig:
    """Write the config whose dense payload has the ordered size (bf16)."""
    width = order.payload_bytes // (2 * CONTEXT)
    assert 2 * CONTEXT * width == order.payload_bytes, "choose a multiple of 200 bytes"
    return RunConfig(
        model=ModelConfig(width=width, context=CONTEXT, layers=order.stages),
        train=TrainConfig(batch=order.microbatches),
        pipeline=PipelineConfig(stages=order.stages, microbatches=order.microbatches),
        codec=codec_defaults("dense"),
    )


def time_steps(engine: Engine, order: Order, ports: dict[int, Port], batch: Tensor | None) -> list[float]:
    """Run steps, the next right behind the one before; on stage 0, which begins and ends a step, the seconds are those of the pipeline."""
    seconds = []
    for step in range(2 + order.steps):
        for port in ports.values():
            port.begin(step)
        started = time.perf_counter()
        engine.step(batch, step, 0)
        seconds.append(time.perf_counter() - started)
    return seconds[2:]


def work_side(order: Order, side: str) -> dict[str, Any]:
    """Be one stage of one side."""
    backend, _, variant = side.partition("-")
    config = run_config(order)
    codec = make_codec(config.codec, config.model)
    stage = NappingStage(config.model, order)
    batch = torch.zeros(order.microbatches, CONTEXT + 1, dtype=torch.int32) if order.stage == 0 else None
    ports: dict[int, Port] = {}
    facts: dict[str, Any] = {}
    if backend == "gloo":
        store = dist.FileStore(f"{order.folder}/{side}", order.stages)
        dist.init_process_group("gloo", store=store, rank=order.stage, world_size=order.stages)
        engine = Engine(stage, payloads_of(stage, codec, 1), dist.group.WORLD, 1, order.microbatches)  # type: ignore[arg-type]
        engine.rebuild("1f1b", [])
        if variant == "1f1b":
            wrapped = static_stage(engine.module, engine.payloads, 1, dist.group.WORLD)  # type: ignore[arg-type]
            assert isinstance(engine.executor, TorchExecutor)
            engine.executor.schedule = Schedule1F1B(
                wrapped, order.microbatches, loss_fn=lambda loss, target: engine._share(loss), scale_grads=False
            )
        return facts | {"seconds": time_steps(engine, order, ports, batch), "close": close_group}
    # The config has no word for the congestion control: it is the kernel's business, except in this comparison.
    neighbours.link_options = lambda link: LinkOptions(**({"congestion": variant} if variant else {}))
    folder = File(order.folder)
    places, endpoint = Places(read_roster(folder / "roster.toml")), Endpoint(load_identity(folder / f"stage-{order.stage}"))
    mine = neighbours.Neighbours(config, places, endpoint, WorkerId(0, order.stage), side)
    forms = {towards: boundary_form(codec, 1, CONTEXT, order.microbatches, downstream=towards > 0) for towards in mine.sides}
    links = mine.open({worker_id: forms[towards].contract for towards, worker_id in mine.sides.items()})
    for towards, link in ((-1, links.left), (1, links.right)):
        if link is not None:
            ports[order.stage + towards] = boundary_port(link, codec, forms[towards])
    meter = next(iter(ports.values())).link.meter
    facts = {"congestion": next(iter(ports.values())).link.congestion, "opened": meter.snapshot()}
    engine = Engine(stage, payloads_of(stage, codec, 1), open_group(order.stage, order.stages, ports), 1, order.microbatches)
    facts["in_flight"] = depths(order.stages, order.microbatches, order.delay_seconds, order.forward_seconds + order.backward_seconds)
    engine.rebuild("depth", facts["in_flight"])
    seconds = time_steps(engine, order, ports, batch)
    facts["done"] = meter.snapshot()
    return facts | {"seconds": seconds, "close": lambda: (close_group(), mine.close())}


def work(order: Order) -> None:
    """Be the worker of a host: each side in turn; print what stage 0 measured."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = order.interface
    for side in order.sides:
        found = work_side(order, side)
        found.pop("close")()
        if order.stage == 0:
            print(json.dumps({"side": side, **found}), flush=True)


def run_sides(order: Order, loss: float = 0.0, timeout: float = 300.0) -> dict[str, dict[str, Any]]:
    """Run every side on one bed; return what stage 0 measured for each, with the median of its steps."""
    paths = [Path(rate_mbps=order.rate_mbps, delay_ms=order.rtt_ms / 2, loss=loss)] * (order.stages - 1)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as scratch, Testbed(paths, routed=True) as bed:
        workers, processes = [], []
        for stage in range(order.stages):
            identity = make_identity(File(scratch) / f"stage-{stage}", f"stage-{stage}")
            address = f"{bed.address(stage, towards=stage + 1)}:{PORT}" if stage + 1 < order.stages else None
            workers.append(Worker(WorkerId(0, stage), identity.certificate, address))
        write_roster(File(scratch) / "roster.toml", Roster.of(workers))
        for stage in range(order.stages):
            interface = bed.interface(stage, towards=stage + 1 if stage + 1 < order.stages else stage - 1)
            own = asdict(order) | {"stage": stage, "folder": scratch, "interface": interface}
            command = [sys.executable, __file__, json.dumps(own)]
            processes.append(bed.popen(stage, command, stdout=subprocess.PIPE if stage == 0 else None, text=True))
        lines = processes[0].communicate(timeout=timeout)[0].splitlines()
        if any(process.wait(20) for process in processes):
            raise RuntimeError("a worker failed; its message is above")
    found = {(row := json.loads(line)).pop("side"): row for line in lines}
    return {side: row | {"median": statistics.median(row["seconds"])} for side, row in found.items()}


def write_results(name: str, results: Any) -> None:
    """Keep the figures beside the benches."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    work(Order(**given | {"sides": tuple(given["sides"])}))
