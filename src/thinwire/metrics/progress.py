"""The progress of a run for people: live lines at the foot of a terminal, now and then a plain line elsewhere, and news above them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from thinwire.config.profiles import find_profile
from thinwire.config.sections import RunConfig
from thinwire.metrics.estimate import Estimate, duration
from thinwire.metrics.track import Tracker
from thinwire.metrics.verdict import Verdict

PAUSE_SECONDS = 2.0
"""Between plain lines: frequent enough to see life, rare enough for a log file."""
LONGEST_BAR = 60
FORMS = {
    "loss": ("loss {:.4f}", "loss {:.4f}"),
    "val_loss": ("validation {:.4f}", "val {:.4f}"),
    "tokens_per_second": ("{:,.0f} tokens/s", "{:,.0f} tok/s"),
    "bytes_per_token": ("{:,.1f} bytes/token", "{:,.0f} B/tok"),
}
"""How values are written where there is room, and where there is less."""
LEAST_WANTED = ("val_loss", "bytes_per_token", "tokens_per_second")
"""What is left out where there is no room, in this order."""


class Progress(Tracker):
    """Show step, loss, validation loss, tokens per second, bytes per token and how long the rest takes."""

    def __init__(
        self,
        steps: int,
        start: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        estimate: Estimate | None = None,
        verdict: Verdict | None = None,
        below: Callable[[int], RenderableType] | None = None,
    ) -> None:
        """`below` draws what stands under the lines of a terminal, in so many columns; whoever gives it notes the verdict's values."""
        self.steps, self.done, self.stream, self.clock = steps, start, stream or sys.stdout, clock
        self.estimate, self.verdict, self.below = estimate or Estimate(steps), verdict or Verdict(), below
        self.shown: dict[str, Any] = {}
        self.widths: dict[str, int] = {}
        """The widest each value has been: what follows it must not move to and fro."""
        self.printed_at = -math.inf
        self.pending = False
        self.live: Live | None = None
        if self.stream.isatty():
            self.live = Live(get_renderable=lambda: Foot(self), console=Console(file=self.stream, highlight=False), refresh_per_second=4)
            self.live.start()

    @classmethod
    def of(
        cls,
        config: RunConfig,
        *,
        alone: bool = False,
        below: Callable[[int], RenderableType] | None = None,
        stream: TextIO | None = None,
    ) -> Progress:
        """Show a run with these settings; `alone`: one stage of several."""
        train = config.train
        mbps = min((rate for rate in (find_profile(config.link.profile).up_mbps, config.link.pace_mbps) if rate), default=None)
        estimate = Estimate(train.steps, train.seconds, train.validate_every)
        return cls(train.steps, stream=stream, estimate=estimate, verdict=Verdict(mbps, alone=alone), below=below)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        now = self.clock()
        self.estimate.note(step, values, now)
        if self.below is None:
            self.verdict.note("here", values)
        self.done = step
        self.shown |= values
        if self.live:
            return
        self.pending = True
        if now - self.printed_at >= PAUSE_SECONDS or "val_loss" in values or step >= self.steps:
            self.print_line()

    def say(self, text: str) -> None:
        """Tell some news, above what is live."""
        if self.live:
            self.live.console.print(Text(text))
        else:
            self._write(text)

    def print_line(self) -> None:
        self._write(self.describe())
        self.printed_at, self.pending = self.clock(), False

    def _write(self, text: str) -> None:
        self.stream.write(f"{text}\n")  # at once: several threads tell news, and `print` writes the end of a line by itself
        self.stream.flush()

    def describe(self, columns: int | None = None) -> str:
        """Write the newest values in one line, in full words where the columns allow it; None: as many as it takes."""
        if not self.shown:
            return "starting"
        if columns is None:
            return "  ".join(self.parts(short=False, steady=False).values())
        parts = self.parts(short=False, steady=True)
        if len("  ".join(parts.values())) > columns:
            parts = self.parts(short=True, steady=True)
        for name in LEAST_WANTED:
            if len("  ".join(parts.values())) > columns:
                parts.pop(name, None)
        return "  ".join(parts.values())[:columns]

    def parts(self, short: bool, steady: bool) -> dict[str, str]:
        """Write every value that is known; `steady` ones keep the room they once had."""
        parts = {"step": f"step {self.done:{len(str(self.steps)) if steady else 1}}/{self.steps}"}
        for name, forms in FORMS.items():
            if self.shown.get(name) is not None:
                parts[name] = forms[short].format(float(self.shown[name]))
                if steady:
                    key = f"{name} {short}"
                    self.widths[key] = max(self.widths.get(key, 0), len(parts[name]))
                    parts[name] = parts[name].rjust(self.widths[key]) if name.endswith(("_second", "_token")) else parts[name]
        left = self.estimate.left(self.clock())
        if left is not None:
            parts["eta"] = f"ETA {duration(left)}"
        return parts

    def close(self) -> None:
        if self.live:
            self.live.stop()
            return
        if self.pending:
            self.print_line()
        if self.done and str(self.verdict):
            self.say(str(self.verdict))


class Foot:
    """What stands at the foot of a terminal, drawn for the width it has at that moment."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        progress, columns = self.progress, options.max_width
        lines: list[RenderableType] = [Text(progress.describe(columns), no_wrap=True, overflow="crop")]
        lines.append(bar_text(progress.done / progress.steps, min(LONGEST_BAR, columns), ascii_only=options.ascii_only))
        if progress.below is not None:
            lines.append(progress.below(columns))
        if text := str(progress.verdict):
            lines.append(Text(text, no_wrap=True, overflow="ellipsis"))
        yield Group(*lines)


def bar_text(share: float, columns: int, *, ascii_only: bool) -> Text:
    """Draw how much of a run is done: its length changes with nothing else."""
    full, rest = ("=", ".") if ascii_only else ("━", "─")
    room = columns - len(" 100 %")
    done = int(room * min(1.0, share))
    return Text.assemble((full * done, "green"), (rest * (room - done), "dim"), f" {int(100 * share):3} %")
