"""Which run a command line goes on with or begins from, and what it may change of that run's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from thinwire.config.command_line import DEFAULT_CONFIG, parse_config
from thinwire.config.registry import CODECS
from thinwire.config.sections import RunConfig
from thinwire.config.toml import ADJUSTABLE, CONFIG_FILE, LOCAL, RESHAPING, flatten, load_config, read_config
from thinwire.run.folder import is_begun, is_free, is_half_forked
from thinwire.util.notices import note

Given = Mapping[str, str | None]
"""Options of a command line, with the value that follows each."""


def run_folder(given: Given, config: RunConfig | None) -> Path:
    """Return the run folder that was given, else runs/CONFIG-CODEC-SEED."""
    if named := given.get("run"):
        return Path(named)
    assert config is not None
    return Path("runs") / f"{Path(given.get('config') or DEFAULT_CONFIG).stem}-{config.codec.name}-{config.seed}"


def refuse_used(run: Path) -> None:
    """Refuse to begin a run in a folder that holds something worth keeping."""
    refuse_half_forked(run)
    if not is_free(run):
        raise ValueError(f"the run folder {run} exists; choose another with --run DIR, or add --resume to go on with that run")


def refuse_half_forked(run: Path) -> None:
    """Refuse a folder whose fork broke off: only another fork may use it."""
    if is_half_forked(run):
        raise ValueError(
            f"{run} is half a run: the checkpoint that it was to begin from was not copied to the end; give thinwire train --from RUN "
            f"--run {run} again, or delete the folder"
        )


def resumed(argv: list[str], given: Given) -> tuple[Path, RunConfig]:
    """Find the run to go on with and its settings, changed only where a started run can change."""
    named, placed = given.get("config"), given.get("run")
    # The same command with --resume added must work: so a config that is named has to say what the run's own settings say.
    wanted = parse_config(argv, load_config(named or DEFAULT_CONFIG)) if named or not placed else None
    run = run_folder(given, wanted)
    refuse_half_forked(run)
    if not (run / CONFIG_FILE).is_file() and is_begun(run):  # killed before its settings were written
        return run, wanted or parse_config(argv, load_config(named or DEFAULT_CONFIG))
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"cannot resume: {run / CONFIG_FILE} does not exist; check --run, or leave --resume out to start a new run")
    return run, adapted(argv, given, run, wanted if named else None)


def forked(argv: list[str], given: Given) -> tuple[Path, Path, RunConfig]:
    """Find the run to begin from, the folder of the new one, and its settings, changed only where a started run can change."""
    source, named = given["from"], given.get("config")
    if source is None or given.get("run") is None or "resume" in given:
        raise ValueError("--from RUN begins a new run where RUN stands: write thinwire train --from RUN --run NEW, without --resume")
    run = run_folder(given, None)
    if not (Path(source) / CONFIG_FILE).is_file():
        raise ValueError(f"--from {source}: {Path(source) / CONFIG_FILE} does not exist; give the folder that `thinwire train --run` wrote")
    if not is_half_forked(run):
        refuse_used(run)
    return Path(source), run, adapted(argv, given, Path(source), parse_config(argv, load_config(named)) if named else None)


def adapted(argv: list[str], given: Given, run: Path, wanted: RunConfig | None) -> RunConfig:
    """Return a run's own settings with the options that were given, refusing what differs in them or in a config that was named."""
    named = given.get("config")
    stored = read_config(run / CONFIG_FILE)
    config = parse_config(argv, reshaped(stored, given))
    if wanted:
        wanted = settled(wanted, stored)
        refuse_other_settings(run, stored, wanted, f"--config {named} and the options beside it give")
        if named and named.endswith(".toml"):  # a packaged one nobody has changed: naming it says nothing new
            config = adjusted(config, wanted, named)
    refuse_other_settings(run, stored, config, "the command line gives")
    refuse_other_microbatches(run, stored, config)
    return config


def settled(wanted: RunConfig, stored: RunConfig) -> RunConfig:
    """Return wanted settings with the free layers that the cut at the start of a run has settled."""
    if wanted.model.free_layers is not None:
        return wanted
    return dataclasses.replace(wanted, model=dataclasses.replace(wanted.model, free_layers=stored.model.free_layers))


def for_resume(wanted: RunConfig | None, run: Path) -> RunConfig:
    """Return the settings with which a run goes on: its own, or wanted ones, which differ only where a started run can change."""
    refuse_half_forked(run)
    if not (run / CONFIG_FILE).is_file():
        raise ValueError(f"cannot resume: {run / CONFIG_FILE} does not exist; check the run folder, or leave resume out to start a new run")
    stored = read_config(run / CONFIG_FILE)
    if wanted is None:
        return stored
    wanted = settled(wanted, stored)
    refuse_other_settings(run, stored, wanted, "the config gives")
    refuse_other_microbatches(run, stored, wanted)
    return wanted


def adjusted(config: RunConfig, wanted: RunConfig, named: str) -> RunConfig:
    """Return a run's settings with what a resume may change as a file, and the options beside it, have it; say what that changes."""
    before, after = flatten(config), flatten(wanted)
    changed = [name for name in sorted(ADJUSTABLE) if before[name] != after[name]]
    for name in changed:
        section, _, field = name.partition(".")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{field: after[name]})})
        note(f"{name} is {after[name]} from now on, by {named}; it was {before[name]}")
    return config


def reshaped(stored: RunConfig, given: Given) -> RunConfig:
    """Forget the run's split where another number of stages is asked for and no split with it."""
    if given.get("pipeline.stages") in (None, str(stored.pipeline.stages)) or "pipeline.split" in given:
        return stored
    return dataclasses.replace(stored, pipeline=dataclasses.replace(stored.pipeline, split=None))


def refuse_other_microbatches(run: Path, stored: RunConfig, config: RunConfig) -> None:
    """Refuse to feed a codec other microbatches if what it sends depends on them."""
    before, after = stored.pipeline.microbatches, config.pipeline.microbatches
    if before != after and CODECS.load(config.codec.name).depends_on_microbatch:
        raise ValueError(
            f"cannot resume {run} with pipeline.microbatches {after}, it has {before}: what the codec {config.codec.name!r} sends depends "
            "on the microbatch; leave that out, or start a new run with another --run"
        )


def refuse_other_settings(run: Path, stored: RunConfig, other: RunConfig, giver: str) -> None:
    """Raise ValueError for the first field, fixed once a run has started, that differs."""
    before, after = flatten(stored), flatten(other)
    for name in before | after:
        if name not in LOCAL | RESHAPING | ADJUSTABLE and before.get(name) != after.get(name):
            raise ValueError(
                f"cannot resume {run}: its {name} is {before.get(name)}, {giver} {after.get(name)}; a started run keeps it: "
                "leave that out, or start a new run with another --run"
            )
