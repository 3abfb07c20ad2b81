"""What the supervisor shows while workers train: loss, a line per stage and a verdict on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich.table import Table

from thinwire.config.sections import RunConfig
from thinwire.link.peer import WorkerId
from thinwire.metrics.news import called, tell
from thinwire.metrics.progress import Progress
from thinwire.metrics.track import Tracker
from thinwire.metrics.verdict import SPANS
from thinwire.model.cut import cut_layers

FIRST = WorkerId(0, 0)
COMMON = frozenset({"loss", "gradient_norm", "rate", "seconds", "tokens", "tokens_per_second", "val_loss"})
"""Values that every stage gives alike; the trackers take them from stage 0."""
OF_FIRST = frozenset({"reading", "tokenising", "examples", "corpus", "kept", "stopped_by"})
"""Events that the first stage tells for everyone."""
COLUMNS = {"stage": 6, "layers": 8, "step": 8, "compute": 9, "encode": 8, "wait": 7, "decode": 8, "to next": 12, "to previous": 12}
"""Headings of a line per stage, and the room each takes."""
LEAST_WANTED = ("encode", "decode", "layers", "step", "to previous")
"""What is left out where there is no room, in this order."""


class RunView:
    """Take the values of every stage's steps, show them and hand them to trackers, which are closed by whoever opened them."""

    def __init__(self, config: RunConfig, trackers: Sequence[Tracker] = (), *, shown: bool = True) -> None:
        self.config, self.trackers = config, trackers
        self.ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
        self.latest: dict[WorkerId, Mapping[str, Any]] = {}
        self.tracked: dict[WorkerId, int] = {}
        self.reached = 0
        """Steps that were done when one was last abandoned."""
        self.progress = Progress.of(config, below=self.table, stream=None if shown else StringIO())

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.close()

    def log(self, worker_id: WorkerId, step: int, values: Mapping[str, Any]) -> None:
        """Take what a worker says of a step."""
        self.latest[worker_id] = {"step": step, **values}
        self.progress.verdict.note(worker_id, values)
        if worker_id == FIRST:
            self.progress.log(step, values)
        own = f"{f'replica-{worker_id.replica}-' if worker_id.replica else ''}stage-{worker_id.stage}"
        tracked = values if worker_id == FIRST else {f"{own}/{name}": value for name, value in values.items() if name not in COMMON}
        if step > self.tracked.get(worker_id, 0):  # a step that is done again after a loss has the same values
            self.tracked[worker_id] = step
            for tracker in self.trackers:
                tracker.log(step, tracked)

    def event(self, worker_id: WorkerId, message: Mapping[str, Any]) -> None:
        """Say what happens to the workers: a worker was lost, and how all go on; of the rest, what the first stage says."""
        text: str | None = None
        if worker_id == FIRST:
            self.reached = message.get("abandoned", self.reached)
        if "measured" in message:
            self.progress.verdict.measured[worker_id] = message["mbps"]
        elif "lost" in message:
            text = f"{self.called(worker_id)} was lost ({message['lost']}); another process takes its place"
        elif "restored" in message:
            again = self.reached - message["restored"]
            text = f"all stages go on from step {message['restored']}" + (f"; {again} steps are done again" if again > 0 else "")
        elif OF_FIRST & message.keys():
            text = tell(message)
        if text and (worker_id == FIRST or "lost" in message):
            self.progress.say(text)

    def table(self, columns: int) -> Table:
        """Draw a line for each stage, in so many columns."""
        headings = dict(COLUMNS)
        for name in LEAST_WANTED:
            if sum(headings.values()) > columns:
                del headings[name]
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
        for name, width in headings.items():
            table.add_column(name, justify="left" if name == "stage" else "right", width=width - 1, no_wrap=True)
        for replica in range(self.config.replicas.count):
            for stage in range(len(self.ranges)):
                texts = self.row(WorkerId(replica, stage))
                table.add_row(*(texts[name] for name in headings))
        return table

    def row(self, worker_id: WorkerId) -> dict[str, str]:
        """Write what is known of a stage; rates are in Mbit/s."""
        layers, values = self.ranges[worker_id.stage], self.latest.get(worker_id, {})
        total = sum(values.get(f"{span}_seconds", 0.0) for span in SPANS)
        return {
            "stage": f"{worker_id.replica}/{worker_id.stage}" if self.config.replicas.count > 1 else str(worker_id.stage),
            "layers": f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else str(layers.start),
            "step": str(values.get("step", "")),
            **{span: f"{100 * values[f'{span}_seconds'] / total:.0f} %" if total else "" for span in SPANS},
            "to next": rate_text(values.get("right_mbps")),
            "to previous": rate_text(values.get("left_mbps")),
        }

    def called(self, worker_id: WorkerId) -> str:
        """Name a worker."""
        return called(worker_id, self.config.replicas.count)


def rate_text(mbps: float | None) -> str:
    """Write a rate in the same few letters from thin lines to fast ones."""
    return "" if mbps is None else f"{mbps:.2f} Mb/s" if mbps < 100 else f"{mbps:,.0f} Mb/s"
