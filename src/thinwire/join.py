"""Run one stage of a run whose other stages are elsewhere: `thinwire join ROSTER --stage 1 --config laptop --keys keys`.

Two machines, two commands: see docs/two_machines.md. The roster says who the others are; the config must be the same everywhere, and
the links refuse each other with the name of what differs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from thinwire.config import RunConfig
from thinwire.link.errors import LinkError
from thinwire.link.roster import Place, Roster, read_roster
from thinwire.link.tls import Identity, load_identity
from thinwire.pipeline.backend import close_group
from thinwire.pipeline.device import choose_device
from thinwire.pipeline.neighbours import Neighbours
from thinwire.pipeline.worker import WorkerPipeline
from thinwire.settings import parse_join
from thinwire.track import Progress, Tracker
from thinwire.train import Stop, Trainer, how_to_go_on


def main(argv: list[str]) -> None:
    """Run the `join` verb."""
    command = parse_join(argv)
    roster = read_roster(command.roster)
    identity = load_identity(command.keys)
    stop = Stop()
    try:
        with Progress(command.config.train.steps) as progress:
            summary = train_stage(
                command.config,
                roster,
                identity,
                command.stage,
                command.run,
                resume=command.resume,
                trackers=[progress],
                stop=stop,
                listen=command.listen,
            )
    except LinkError as error:
        raise ValueError(str(error)) from error
    if summary["steps"] < command.config.train.steps:
        words = f"{command.roster} --stage {command.stage} --keys {command.keys} --run {command.run}"
        print(how_to_go_on(summary, f"thinwire join {words} --resume (on every machine)"))
    print(f"stage {command.stage} done: validation loss {summary['val_loss']:.4f} after {summary['steps']} steps; {command.run}")


def train_stage(
    config: RunConfig,
    roster: Roster,
    identity: Identity,
    stage: int,
    run: Path,
    *,
    resume: bool = False,
    trackers: Sequence[Tracker] = (),
    stop: Stop | None = None,
    listen: str | None = None,
) -> dict:
    """Train one stage in step with the others of the roster; return the run's summary."""
    if not 0 <= stage < config.pipeline.stages:
        raise ValueError(
            f"there is no stage {stage}: pipeline.stages is {config.pipeline.stages}; choose 0 to {config.pipeline.stages - 1}"
        )
    place = Place(0, stage)
    if roster.worker(place).certificate.strip() != identity.certificate.strip():
        raise ValueError(
            f"the roster's certificate for {place} is not that of {identity.certificate_path}; "
            "use the keys it was made with, or write the roster again with this certificate"
        )
    torch.set_num_threads(config.train.threads or torch.get_num_threads())
    neighbours = Neighbours(roster, identity, place, run_name(roster), incarnation=incarnation(), listen=listen)
    try:
        pipeline = WorkerPipeline(config, stage, neighbours, choose_device(config.device))
        return Trainer(config, run, pipeline, resume=resume, trackers=trackers, stop=stop).run()
    finally:
        close_group()
        neighbours.close()


def run_name(roster: Roster) -> str:
    """Name a run by its members: all of them derive the same name."""
    members = "\n".join(f"{place} {worker.certificate.strip()}" for place, worker in roster.workers.items())
    return hashlib.sha256(members.encode()).hexdigest()[:16]


def incarnation() -> int:
    """Return a number that differs each time this worker starts, and grows."""
    return time.time_ns() // 1000
