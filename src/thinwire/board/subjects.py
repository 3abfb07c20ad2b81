"""What a comparison is of: codecs of a boundary, or exchanges between replicas. The rest of the folder asks here for all that differs.

No torch here but where a question needs it: the command line is read without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from thinwire.board.report import MISSING, figure_text, loss_text, seconds_text, time_text, times
from thinwire.board.rows import Row, read_lines
from thinwire.board.score import SpecRows, Standing, mean_of
from thinwire.config import registry
from thinwire.config.options import choose_options, options_from_table
from thinwire.config.sections import RunConfig

if TYPE_CHECKING:
    from thinwire.board.request import Spec

OFF = 1.3
"""Times more, or fewer, bytes in timed steps than in those of learning rows that a reader must know of."""


class Subject(Protocol):
    """The contract of both: what is compared, by which bytes, against which of them, and how its board is written."""

    noun: str
    """What one of them is called."""
    form: str
    """How one is written."""
    introduced_by: tuple[str, ...]
    """Option of `thinwire compare` that stands before them."""
    reference: str
    """Spec that all others are judged by."""
    mode: Literal["inprocess", "workers"]
    """Where learning rows are trained."""
    unit: str
    """What row files count bytes by: the first half of their names for them."""
    parts: tuple[str, ...]
    """What bytes are split into: the second half."""
    judged: tuple[str, ...]
    """Parts that together are what a method saves or not."""
    axis: str
    """What a plot calls them."""
    scale: int
    """Bytes by which plots and tables count."""
    out: Path
    """Where boards go unless told otherwise."""
    page: bool
    """Whether all boards are put together on one page beside that folder; else each is a page with its plots."""
    bytes_title: str
    """What is counted, in few words."""
    explanation: str
    """What a reader must know of the table's columns."""
    long: Mapping[str, str]
    """What a column is called in the file, where there is more room."""

    def refuse_option(self, name: str) -> None:
        """Refuse an option of `thinwire train` that a SPEC gives instead."""

    def refuse_config(self, config: RunConfig) -> None:
        """Refuse settings in which nothing can be compared."""

    def apply(self, spec: Spec, config: RunConfig) -> RunConfig:
        """Put a spec's method and its options into the settings; what it does not say has the method's own defaults."""

    def plain(self, spec: Spec, config: RunConfig) -> tuple[list[str], RunConfig]:
        """Return options of `thinwire train` that name the method, and the settings with nothing but that name."""

    def warmup(self, config: RunConfig) -> int:
        """Return how many steps at the start cross uncompressed."""

    def compressed(self, config: RunConfig) -> RunConfig:
        """Return the settings without those steps."""

    def meeting(self, config: RunConfig) -> int:
        """Return how many steps go from one meeting of replicas to the next; 0: there are no replicas."""

    def keeps_microbatches(self, config: RunConfig) -> bool:
        """Tell whether a learning row must have the microbatches of the timed ones."""

    def grid(self, config: RunConfig) -> str:
        """Return what names of rows bear besides the spec: boards of other shapes have rows of their own in the same folder."""

    def sent(self, summary: Row, run: Path, resumed_at: int) -> Row:
        """Return what a learning row says of the bytes of its run."""

    def setting(self, config: RunConfig) -> str:
        """Say what all specs have in common, beside the config."""

    def notes(self, rows: SpecRows, meeting: int, validate_every: int) -> Iterator[str]:
        """Tell what the figures of a spec do not show."""

    def learning_cells(self, standing: Standing, seeds: int) -> dict[str, str]:
        """Write what concerns loss and bytes, by the names of the columns."""

    def link_cells(self, standing: Standing, link: str) -> dict[str, str]:
        """Write what concerns one link."""


class Codecs:
    """Methods for boundaries, compared in one replica."""

    noun, reference, form = "codec", "dense", "NAME[:OPTION=VALUE,...], such as subspace:rank=16"
    introduced_by: tuple[str, ...] = ()
    mode: Literal["inprocess", "workers"] = "inprocess"
    unit = "bytes_per_token"
    parts: tuple[str, ...] = ("forward", "backward")
    judged: tuple[str, ...] = ("forward", "backward")
    axis, scale = "bytes per token and boundary, both directions", 1
    out, page = Path("out/board"), True
    bytes_title = "bytes per token and boundary"
    explanation = "Bytes are payload per token and boundary, ids included."
    long: Mapping[str, str] = {
        "parameters": "trainable parameters",
        "loss": "validation loss",
        "forward": "bytes/token forward",
        "bytes/token": "both",
        "fewer": "fewer than dense",
        "s to loss": "time to loss, s",
        "faster": "faster than dense",
    }

    def refuse_option(self, name: str) -> None:
        if name.startswith("codec."):
            raise ValueError(f"--{name}: options of a codec belong into its SPEC; write NAME:{name.removeprefix('codec.')}=VALUE")

    def refuse_config(self, config: RunConfig) -> None:
        count, stages = config.replicas.count, config.pipeline.stages
        if count > 1:
            raise ValueError(
                f"replicas.count is {count}, but codecs are compared in one replica; leave it out, or compare --exchange METHODs"
            )
        if stages < 2:
            raise ValueError(f"pipeline.stages is {stages}, so nothing crosses a boundary; choose 2 or more")

    def apply(self, spec: Spec, config: RunConfig) -> RunConfig:
        return replace(config, codec=options_from_table("codec", {**dict(spec.options), "name": spec.method}, "options"))

    def plain(self, spec: Spec, config: RunConfig) -> tuple[list[str], RunConfig]:
        return ["--codec.name", spec.method], replace(config, codec=choose_options("codec", config.codec, spec.method))

    def warmup(self, config: RunConfig) -> int:
        from thinwire.codecs.base import LossyOptions

        return config.codec.warmup if isinstance(config.codec, LossyOptions) else 0

    def compressed(self, config: RunConfig) -> RunConfig:
        return replace(config, codec=replace(config.codec, warmup=0)) if self.warmup(config) else config

    def meeting(self, config: RunConfig) -> int:
        return 0

    def keeps_microbatches(self, config: RunConfig) -> bool:
        # The first step size is chosen by a step's first microbatch, and each payload's header counts into the rate.
        return registry.CODECS.load(config.codec.name).depends_on_microbatch or config.codec.entropy

    def grid(self, config: RunConfig) -> str:
        return ""

    def sent(self, summary: Row, run: Path, resumed_at: int) -> Row:
        return {f"{self.unit}_{part}": summary[f"{self.unit}_{part}"] for part in self.parts}

    def setting(self, config: RunConfig) -> str:
        return ""

    def notes(self, rows: SpecRows, meeting: int, validate_every: int) -> Iterator[str]:
        return iter(())

    def learning_cells(self, standing: Standing, seeds: int) -> dict[str, str]:
        return {
            "codec": standing.label,
            "parameters": figure_text(standing.parameters, ",d"),
            "loss": loss_text(standing, seeds),
            "to dense": MISSING if standing.above is None else f"{standing.above:+.2f} %",
            "forward": figure_text(standing.sent.get("forward"), ",.1f"),
            "backward": figure_text(standing.sent.get("backward"), ",.1f"),
            "bytes/token": figure_text(standing.judged, ",.1f"),
            "fewer": times(standing.fewer),
        }

    def link_cells(self, standing: Standing, link: str) -> dict[str, str]:
        on_link = standing.links[link]
        return {
            "tokens/s": figure_text(on_link.tokens_per_second, ",.0f"),
            "s to loss": time_text(standing, on_link),
            "faster": times(on_link.faster),
        }


class Exchanges:
    """Ways in which replicas learn from each other, all with the config's codec."""

    noun, reference, form = "exchange", "allreduce", "NAME[:OPTION=VALUE,...], such as powersgd:rank=4"
    introduced_by: tuple[str, ...] = ("--exchange",)
    mode: Literal["inprocess", "workers"] = "workers"
    unit = "bytes_per_step"
    parts: tuple[str, ...] = ("exchange", "boundary", "control")
    judged: tuple[str, ...] = ("exchange",)
    axis, scale = "KB exchanged per step, all workers together", 1000
    out, page = Path("out/exchanges"), False
    bytes_title = "KB per step, all workers"
    explanation = (
        "Losses are means over the replicas. KB (1,000 bytes) are what all workers together send in a step: "
        "messages between replicas, payloads of boundaries with ids, and control with its frames; fewer: exchange alone."
    )
    long: Mapping[str, str] = {
        "loss": "validation loss",
        "KB exchange": "KB/step exchange",
        "KB boundary": "boundary",
        "KB control": "control",
        "fewer": "fewer than allreduce",
        "s to loss": "time to loss, s",
        "faster": "faster than allreduce",
    }

    def refuse_option(self, name: str) -> None:
        if name == "replicas.exchange" or name.startswith("exchange."):
            raise ValueError(f"--{name} is not for thinwire compare --exchange; name the method, with its options, behind --exchange")

    def refuse_config(self, config: RunConfig) -> None:
        if config.replicas.count == 1:
            raise ValueError("replicas.count is 1, and an exchange takes place between replicas; add --replicas.count 2")
        if warmup := CODECS.warmup(config):
            raise ValueError(f"codec.warmup is {warmup}: its uncompressed steps would be timed as compressed ones; add --codec.warmup 0")

    def apply(self, spec: Spec, config: RunConfig) -> RunConfig:
        return replace(config, exchange=options_from_table("exchange", {**dict(spec.options), "name": spec.method}, "options"))

    def plain(self, spec: Spec, config: RunConfig) -> tuple[list[str], RunConfig]:
        return ["--exchange.name", spec.method], replace(config, exchange=choose_options("exchange", config.exchange, spec.method))

    def warmup(self, config: RunConfig) -> int:
        return getattr(config.exchange, "warmup", 0)

    def compressed(self, config: RunConfig) -> RunConfig:
        return replace(config, exchange=replace(config.exchange, warmup=0)) if self.warmup(config) else config

    def meeting(self, config: RunConfig) -> int:
        from thinwire.replicas.graph import make_graph
        from thinwire.replicas.peers import Peers

        options = self.compressed(config).exchange
        # Nothing is exchanged: it is only asked.
        asked = registry.EXCHANGES.load(options.name)(options, config, Peers(0, make_graph("complete", 1), {}), {})
        # The end of a run is a meeting too.
        return next(step + 1 for step in range(config.train.steps) if asked.talks_before(step) or asked.talks_after(step))

    def keeps_microbatches(self, config: RunConfig) -> bool:
        return True  # workers have no use for larger ones

    def grid(self, config: RunConfig) -> str:
        return f"-{config.replicas.count}x{config.pipeline.stages}"

    def sent(self, summary: Row, run: Path, resumed_at: int) -> Row:
        found = {f"{self.unit}_{part}": summary[self.unit][part] for part in self.parts}
        lines = [line for path in run.glob("**/metrics/stage-*.jsonl") for line in read_lines(path)]
        if not all("exchange_bytes" in line for line in lines):  # an earlier version counted: the summary knows the last stretch alone
            return found | {"resumed_at": resumed_at}
        return found | {f"{self.unit}_exchange": sum(line["exchange_bytes"] for line in lines) / summary["steps"], "resumed_at": 0}

    def setting(self, config: RunConfig) -> str:
        return f"{config.replicas.count} replicas of {config.pipeline.stages} stages, codec `{config.codec.name}`"

    def notes(self, rows: SpecRows, meeting: int, validate_every: int) -> Iterator[str]:
        if validate_every % meeting:
            yield (
                f"`{rows.label}` meets every {meeting} steps and is validated every {validate_every}: "
                "in between this is the mean over replicas that differ."
            )
        if resumed := [row["resumed_at"] for row in rows.learn if row.get("resumed_at")]:
            yield f"`{rows.label}` was interrupted: its bytes are those from step {max(resumed)} on."
        if rows.warmup:
            yield (
                f"`{rows.label}` sends gradients whole in its first {rows.warmup} steps: KB/step has them, s/step does not; in time to "
                "loss each of them counts as one of allreduce."
            )
            return
        timed = mean_of([turn[self.unit]["exchange"] for row in rows.speed.values() for turn in row["turns"]])
        learnt = mean_of([row[f"{self.unit}_exchange"] for row in rows.learn])
        if timed and learnt and not 1 / OFF < timed / learnt < OFF:
            yield (
                f"`{rows.label}` exchanged {timed / learnt:.1f} times the bytes of its learning rows in its short timed runs, which begin "
                "and end differently: its times may be off; --end-to-end measures them."
            )

    def learning_cells(self, standing: Standing, seeds: int) -> dict[str, str]:
        sent = {part: standing.sent.get(part) for part in self.parts}
        return {
            "exchange": standing.label,
            "loss": loss_text(standing, seeds),
            f"to {self.reference}": MISSING if standing.above is None else f"{standing.above:+.2f} %",
            **{f"KB {part}": MISSING if value is None else seconds_text(value / self.scale) for part, value in sent.items()},
            "fewer": times(standing.fewer),
        }

    def link_cells(self, standing: Standing, link: str) -> dict[str, str]:
        on_link = standing.links[link]
        return {
            "s/step": MISSING if on_link.pace is None else seconds_text(on_link.pace.seconds),
            "s to loss": time_text(standing, on_link),
            "faster": times(on_link.faster),
        }


CODECS: Subject = Codecs()
EXCHANGES: Subject = Exchanges()
