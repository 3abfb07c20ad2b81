"""What the supervisor shows while workers train: a live table of stages and links on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinwire.config import RunConfig
from thinwire.link.profile import find_profile
from thinwire.link.roster import Place
from thinwire.model.cut import cut_layers
from thinwire.track import Progress, Tracker

FIRST = Place(0, 0)
SPANS = ("compute", "encode", "wait", "decode")
COMMON = frozenset({"loss", "gradient_norm", "rate", "seconds", "tokens", "tokens_per_second", "val_loss"})
"""Values that every stage gives alike; the trackers take them from stage 0."""


class RunView:
    """Take the values of every stage's steps, show them and hand them to trackers, which are closed by whoever opened them."""

    def __init__(self, config: RunConfig, trackers: Sequence[Tracker] = ()) -> None:
        self.config, self.trackers = config, trackers
        self.ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
        self.latest: dict[Place, Mapping[str, Any]] = {}
        self.tracked: dict[Place, int] = {}
        self.reached = 0
        """Steps that were done when one was last abandoned."""
        self.rate = find_profile(config.link.profile).up_mbps
        self.terminal = sys.stdout.isatty()
        self.progress = Progress(config.train.steps, stream=io.StringIO() if self.terminal else None)
        self.live = Live(self.table(), console=Console(), refresh_per_second=4) if self.terminal else None

    def __enter__(self) -> RunView:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.close()
        if self.live:
            self.live.update(self.table())
            self.live.stop()

    def log(self, place: Place, step: int, values: Mapping[str, Any]) -> None:
        """Take what a worker says of a step."""
        self.latest[place] = {"step": step, **values}
        if place == FIRST:
            self.progress.log(step, values)
        own = f"{f'replica-{place.replica}-' if place.replica else ''}stage-{place.stage}"
        tracked = values if place == FIRST else {f"{own}/{name}": value for name, value in values.items() if name not in COMMON}
        if step > self.tracked.get(place, 0):  # a step that is done again after a loss has the same values
            self.tracked[place] = step
            for tracker in self.trackers:
                tracker.log(step, tracked)
        if self.live:
            self.live.update(self.table())

    def event(self, place: Place, message: Mapping[str, Any]) -> None:
        """Say what happens to the crew: a worker was lost, and how all go on."""
        text = ""
        if place == FIRST:
            self.reached = message.get("abandoned", self.reached)
        if "lost" in message:
            text = f"{self.called(place)} was lost ({message['lost']}); another process takes its place"
        elif place == FIRST and "restored" in message:
            again = self.reached - message["restored"]
            text = f"all stages go on from step {message['restored']}" + (f"; {again} steps are done again" if again > 0 else "")
        if text and self.live:
            self.live.console.print(text)
        elif text:
            print(text, flush=True)

    def table(self) -> Group:
        """Draw the state of all stages."""
        table = Table(title=f"{self.config.codec.name} over {self.config.link.profile}")
        for heading in ("stage", "layers", "step", *SPANS, "to the next", "to the previous"):
            table.add_column(heading, justify="left" if heading == "stage" else "right")
        places = [Place(replica, stage) for replica in range(self.config.replicas.count) for stage in range(len(self.ranges))]
        for place in places:
            layers, values = self.ranges[place.stage], self.latest.get(place, {})
            total = sum(values.get(f"{span}_seconds", 0.0) for span in SPANS)
            shares = [f"{100 * values[f'{span}_seconds'] / total:.0f} %" if total else "" for span in SPANS]
            name = f"{layers.start}-{layers.stop - 1}" if len(layers) > 1 else str(layers.start)
            sides = [self.rate_text(values.get(f"{side}_mbps")) for side in ("right", "left")]
            table.add_row(self.called(place).removeprefix("stage "), name, str(values.get("step", "")), *shares, *sides)
        line = Text(self.progress.describe(self.progress.clock()) if self.progress.first else "starting the workers")
        return Group(table, line)

    def called(self, place: Place) -> str:
        """Name a worker."""
        return str(place) if self.config.replicas.count > 1 else f"stage {place.stage}"

    def rate_text(self, mbps: float | None) -> str:
        """Write a rate, with its share of the line where the line has a limit."""
        if mbps is None:
            return ""
        share = f" ({100 * mbps / self.rate:.0f} %)" if self.rate else ""
        return f"{mbps:.2f} Mbit/s{share}"
