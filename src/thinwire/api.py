"""What `import thinwire` offers: train, evaluate, generate, load, export and compare from Python, and codecs and exchanges of one's own.

Thin over the functions that the verbs call. Nothing is printed unless asked for, what a user can cause is a ValueError, and signal
handlers and torch's number of threads are afterwards what they were. docs/python.md shows it at work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from thinwire import checkpoint
from thinwire.board.cases import options_between
from thinwire.board.comparison import run_comparison
from thinwire.board.request import OURS, Request, parse_specs
from thinwire.board.score import Standing
from thinwire.board.subjects import CODECS as COMPARED_CODECS
from thinwire.board.subjects import EXCHANGES as COMPARED_EXCHANGES
from thinwire.board.subjects import Subject
from thinwire.cluster.evaluate import evaluate_in_workers
from thinwire.cluster.generate import write_in_workers
from thinwire.cluster.training import train_on_this_machine
from thinwire.codecs.base import Codec
from thinwire.config.command_line import DEFAULT_CONFIG
from thinwire.config.options import CHOSEN
from thinwire.config.override import override
from thinwire.config.registry import CODECS, EXCHANGES
from thinwire.config.sections import Device, RunConfig
from thinwire.config.toml import flatten, from_toml, load_config
from thinwire.hf.export import ExportCommand, export
from thinwire.metrics.track import Tracker
from thinwire.replicas.exchange import Exchange
from thinwire.run.check import check, resolve
from thinwire.run.command import TrainCommand
from thinwire.run.evaluate import evaluate_here
from thinwire.run.generate import Text, read_prompt, refuse_whole_sequences, write_here
from thinwire.run.loaded import load_model
from thinwire.run.resume import for_resume, refuse_used
from thinwire.run.sampling import Sampling
from thinwire.run.saved import Mode, for_use, read_from, read_settings, read_tokenizer

Values = Mapping[str, Any]
Callback = Callable[[int, Values], object]
"""Takes a step, counted from 1, and its values: loss, val_loss where there is one, gradient_norm, tokens_per_second, ..."""
Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The settings of a run. `Config.load` reads them; the sections are dataclasses of `thinwire.config.sections`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None:  # a codec, an exchange: what the settings have that say nothing of it
                object.__setattr__(self, field.name, getattr(from_toml(""), field.name))

    @classmethod
    def load(cls, source: str | Path = DEFAULT_CONFIG, options: Mapping[str, Any] | None = None) -> Config:
        """Read a packaged config by its name, or a .toml file; `options` are set by their names, such as {"codec.rank": 8}."""
        return _as_config(load_config(str(source))).override(options or {})

    def override(self, options: Mapping[str, Any]) -> Config:
        """Return the same settings but for some, by their names: config.override({"train.steps": 100, "codec.name": "dense"})."""
        return override(self, options)


@dataclass(frozen=True)
class TrainResult:
    """What a training has left."""

    run: Path
    config: RunConfig
    summary: dict[str, Any]
    """What `summary.json` says: val_loss, steps, tokens_per_second, bytes_per_token_forward, weights_sha256, ..."""
    metrics: list[dict[str, Any]]
    """One row per step: step, loss, tokens_per_second, ..., and val_loss where there was a validation."""
    checkpoint: Path | None
    """The newest checkpoint; None: it was stopped before the first."""

    @property
    def finished(self) -> bool:
        """Tell whether all steps are done; one that was stopped goes on with `train(..., resume=True)`."""
        return self.summary["val_loss"] is not None and self.summary["steps"] >= self.config.train.steps


def train(
    config: RunConfig | str | Path | None,
    run: str | Path,
    *,
    resume: bool = False,
    trackers: Iterable[Callback | Tracker | str] = (),
    progress: bool = False,
) -> TrainResult:
    """Train into the folder `run`, in this process or in workers, as `pipeline.mode` says.

    With `resume` go on with the run in that folder; the config may then be None, which means the run's own. Trackers are functions of
    (step, values), `Tracker` objects, or names such as "tensorboard"; an error in a function ends the training. `progress` shows the
    run on standard output. Ctrl-C ends it after the step under way with a checkpoint, and this returns.
    """
    folder, given = Path(run), list(trackers)
    config = for_resume(_config(config) if config is not None else None, folder) if resume else _config(config)
    if not resume:
        refuse_used(folder)
    check(config)
    named = tuple(each for each in given if isinstance(each, str))
    own = [each if isinstance(each, Tracker) else CallbackTracker(each) for each in given if not isinstance(each, str)]
    command = TrainCommand(config=resolve(config), run=folder, resume=resume, track=named)
    with _threads_kept():
        summary = train_on_this_machine(command, trackers=own, shown=progress)
    whole = checkpoint.complete(folder)
    return TrainResult(folder, command.config, summary, _metrics(folder), whole[-1] if whole else None)


class CallbackTracker(Tracker):
    """Hand the values of a step to a function."""

    def __init__(self, function: Callback) -> None:
        if not callable(function):
            raise ValueError(f"the tracker {function!r} is neither a function of (step, values), nor a Tracker, nor the name of one")
        self.function = function

    def log(self, step: int, values: Values) -> None:
        self.function(step, values)


def evaluate(
    run: str | Path,
    *,
    source: str | None = None,
    sequences: int = 1024,
    mode: Mode = "inprocess",
    link: str = "open",
    device: Device = "auto",
) -> dict[str, Any]:
    """Measure a run's newest checkpoint: step, loss, perplexity, bits_per_byte; on its own validation text, or that of another source."""
    config = read_from(for_use(read_settings(Path(run)), mode, link, device), Path(run), source)
    with _threads_kept():
        return (evaluate_in_workers if mode == "workers" else evaluate_here)(config, Path(run), sequences)


def generate(
    run: str | Path,
    prompt: str = "",
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    tokenizer: str | None = None,
    mode: Mode = "inprocess",
    link: str = "open",
    device: Device = "auto",
    on_text: Callable[[str], object] | None = None,
) -> str:
    """Return the text with which a run's newest checkpoint goes on; `on_text` takes it piece by piece as it is written."""
    folder, sampling = Path(run), Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    config = for_use(read_settings(folder), mode, link, device)
    refuse_whole_sequences(config, folder)
    vocabulary = read_tokenizer(folder, tokenizer)
    ids, order = read_prompt(prompt, max_new_tokens, sampling, vocabulary, config)
    pieces: list[str] = []

    def add(piece: str) -> None:
        pieces.append(piece)
        if on_text is not None:
            on_text(piece)

    text = Text(vocabulary, ids, add)
    with _threads_kept():
        (write_in_workers if mode == "workers" else write_here)(config, folder, ids, order, text.add)
    text.finish()
    return "".join(pieces)


def load(run: str | Path, *, device: Device = "auto") -> nn.Module:
    """Return a run's newest checkpoint as one torch module: ids (batch x time) in, logits (batch x time x vocabulary) out."""
    return load_model(Path(run), device)


def export_model(
    run: str | Path,
    out: str | Path,
    *,
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None,
    shard_size: str = "2GB",
    step: int | None = None,
    sequences: int | None = 0,
) -> Path:
    """Write a run's checkpoint as a plain Hugging Face folder, where the network is one, else as a folder of our own; return it.

    `sequences` of the validation text are measured for the card: none unless told; None: as many as the run's validation takes.
    """
    with _threads_kept():
        export(ExportCommand(run=Path(run), out=Path(out), dtype=dtype, shard_size=shard_size, step=step, sequences=sequences))
    return Path(out)


def compare(
    specs: Sequence[str],
    config: RunConfig | str | Path = "small",
    *,
    exchanges: bool = False,
    links: Sequence[str] = (),
    steps: int | None = None,
    seeds: Sequence[int] = (),
    target: float | None = None,
    name: str = "screen",
    out: str | Path | None = None,
    end_to_end: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Train each spec ("dense", "subspace:rank=16") with the same settings; return one row for each, as `thinwire compare` would.

    Rows, table and plots go to the folder `out`, and what is there is not made again. Over `links`, which takes worker processes, time to
    loss is measured too. `exchanges`: the specs are exchanges between replicas. `say` takes a line for every row that is made.
    """
    subject = COMPARED_EXCHANGES if exchanges else COMPARED_CODECS
    if isinstance(config, RunConfig):
        steps, seeds = steps or config.train.steps, seeds or (config.seed,)
    base, options = _as_options(config, subject)
    parsed, folder = parse_specs(specs, subject), Path(out or subject.out)
    asked = Request(subject=subject, specs=parsed, config=base, options=tuple(options), name=name, out=folder, end_to_end=end_to_end)
    asked = replace(asked, links=tuple(links), steps=steps, seeds=tuple(seeds), target=target, line="")
    with _threads_kept():
        found = run_comparison(asked, say)
    if found.failed:
        raise ValueError(f"{len(found.failed)} rows are missing; {found.failed[0]}; leave that spec out, or change it")
    return [_standing(each) for each in found.board.standings]


def register_codec(name: str, kind: type[Codec] | None = None, *, text: str = "") -> Any:
    """Make a codec known by a name, in this process: register_codec("mine", Mine), or @register_codec("mine") above its class."""
    return _register(CODECS, Codec, name, kind, text)


def register_exchange(name: str, kind: type[Exchange] | None = None, *, text: str = "") -> Any:
    """Make an exchange between replicas known by a name, in this process, as `register_codec` does a codec."""
    return _register(EXCHANGES, Exchange, name, kind, text)


def _register(registry: Any, base: type, name: str, kind: Any, text: str) -> Any:
    def add(found: Kind) -> Kind:
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ValueError(f"{found!r} is no {registry.kind}: give a subclass of thinwire.{base.__name__}")
        registry.registered.pop(name, None)  # a cell of a notebook that is run again means the new class
        registry.register(name, found, text)
        return found

    return add if kind is None else add(kind)


def _config(config: RunConfig | str | Path | None) -> RunConfig:
    if config is None:
        raise ValueError("the config is None, which means the run's own: add resume=True, or give a config, such as Config.load('laptop')")
    return config if isinstance(config, RunConfig) else load_config(str(config))


def _as_config(config: RunConfig) -> Config:
    return Config(**{field.name: getattr(config, field.name) for field in fields(RunConfig)})


def _as_options(config: RunConfig | str | Path, subject: Subject) -> tuple[str, list[str]]:
    """Return a config as a name or file and options for `thinwire compare`, which has others for some settings."""
    if not isinstance(config, RunConfig):
        return str(config), []
    base = load_config("small")
    names = {f"{section}.name": getattr(config, section).name for section in CHOSEN if section != subject.noun}
    before, after = flatten(override(base, names)), flatten(config)
    wanted = {name: value for name, value in after.items() if name in before and name not in OURS and not name.startswith(subject.noun)}
    chosen = [text for name, value in names.items() if value != flatten(base)[name] for text in (f"--{name}", value)]
    return "small", [*chosen, *options_between(before, wanted)]


def _metrics(run: Path) -> list[dict[str, Any]]:
    paths = [path for name in ("all", "0") if (path := run / "metrics" / f"stage-{name}.jsonl").exists()]
    newest = max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)
    return [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()] if newest else []


def _standing(standing: Standing) -> dict[str, Any]:
    """Return how a spec stands as a flat row."""
    row: dict[str, Any] = {
        "spec": standing.label,
        "val_loss": standing.loss,
        "above_percent": standing.above,
        "parameters": standing.parameters,
    }
    row |= {f"bytes_{part}": value for part, value in standing.sent.items()} | {"fewer": standing.fewer, "curve": standing.curve}
    for name, link in standing.links.items():
        row |= {f"{name}_seconds_per_step": link.pace.seconds if link.pace else None, f"{name}_seconds_to_loss": link.time}
    return row


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Leave torch the number of threads that the caller has chosen."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
