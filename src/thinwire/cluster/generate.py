"""Write text through one worker per stage, with keys and values kept in each, on this machine or among those of a roster.

Across machines every member of the roster calls it; stage 0 has the prompt.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinwire.cluster.membership import Membership
from thinwire.cluster.supervisor import run_workers
from thinwire.cluster.worker_process import Say
from thinwire.config.sections import RunConfig
from thinwire.link.errors import LinkError
from thinwire.model.cut import cut_layers
from thinwire.model.stage import build_stage
from thinwire.pipeline import forms
from thinwire.pipeline.control import Control
from thinwire.pipeline.decode import Reader, WorkerWriter, writing_contract
from thinwire.pipeline.inprocess import build_codec
from thinwire.pipeline.meter import Meter
from thinwire.run.generate import Heard, Order
from thinwire.run.sampling import Sampler
from thinwire.run.saved import load_together
from thinwire.run.stop import Stop
from thinwire.util.device import choose_device


def write_in_workers(config: RunConfig, run: Path, prompt: list[int], order: Order, heard: Heard) -> list[Meter]:
    """Write the text with one process per stage on this machine; return what crossed each boundary."""
    arguments = {"run": str(run), "prompt": prompt, "order": asdict(order)}
    stages = run_workers(write_supervised, config, arguments, lambda worker_id, message: heard(message["token"]), graceful=False)
    return [Meter(**meter) for stage in stages for meter in stage["meters"]]


def write_among(member: Membership, run: Path, prompt: list[int] | None, order: Order | None, heard: Heard) -> list[Meter]:
    """Do the part of this machine's stage; a lost link becomes an error for the user."""
    try:
        return write_stage(member, run, prompt, order, heard)
    except LinkError as error:
        raise ValueError(str(error)) from error


def write_supervised(member: Membership, say: Say, stop: Stop, run: str, prompt: list[int], order: dict[str, Any]) -> dict[str, Any]:
    """Be the worker of a stage; stage 0 tells the supervisor of every token."""
    if member.stage == 0:
        meters = write_stage(member, Path(run), prompt, Order.of(order), lambda token: say({"token": token}))
    else:
        meters = write_stage(member, Path(run))
    return {"meters": [asdict(meter) for meter in meters]}


def write_stage(
    member: Membership,
    run: Path,
    prompt: list[int] | None = None,
    order: Order | None = None,
    heard: Heard = lambda token: None,
) -> list[Meter]:
    """Do one stage's part of writing; prompt and order are stage 0's to give. Return what crossed the boundary behind the stage."""
    config = member.config
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    codec = build_codec(config)
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    layers = ranges[member.stage]
    neighbours = member.neighbours("generate")
    device = choose_device(config.device, neighbours.number_here)
    stage = build_stage(config.model, ranges, member.stage, codec, config.seed, config.adapter).to(device)
    try:
        cuts = {-1: layers.start, 1: layers.stop}
        contracts = {beside: writing_contract(codec.at(cuts[side]), downstream=side > 0) for side, beside in neighbours.sides.items()}
        links = neighbours.open(contracts)
        control = Control(links.left, links.right)
        step = load_together(run, stage, control)
        order = Order.of(control.announce(asdict(order) if order else None, forms.ORDER))
        writer = WorkerWriter(Reader(stage, step, config.train.dtype), codec, links.left, links.right)
        for token in writer.write(prompt, order.length, order.limit, order.end, Sampler(order.sampling)):
            heard(token)
        return writer.meters
    finally:
        neighbours.close()
