"""What a run folder says of the run as a whole: settings, tokenizer, summary, and the history of what was changed on the way."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from thinwire.config.sections import RunConfig
from thinwire.config.toml import ADJUSTABLE, CONFIG_FILE, RESHAPING, flatten, read_config, to_toml
from thinwire.util.disk import shortage
from thinwire.util.files import write_atomic
from thinwire.util.lock import LOCK_FILE
from thinwire.util.notices import warn

TOKENIZER_FILE = "tokenizer.json"
"""The run's tokenizer, kept in its folder so that the run can be used where its source is not."""
SUMMARY_FILE = "summary.json"
HISTORY_FILE = "history.jsonl"
"""One line for each time that a run was forked, or resumed with other settings."""
FORK_MARK = "unfinished-fork"
"""In the folder of a new run while the checkpoint that it begins from is copied there."""
OWN = {CONFIG_FILE, TOKENIZER_FILE, SUMMARY_FILE, HISTORY_FILE, "places.json", "metrics", "checkpoints", "copies"}
TOLD = ADJUSTABLE | RESHAPING | {"data.source", "data.tokenizer"}


def is_free(run: Path) -> bool:
    """Tell whether a new run may use a folder: it is not there, or empty, or a run that ended before its first checkpoint."""
    return not run.exists() or (run.is_dir() and not is_half_forked(run) and (not names_in(run) or is_begun(run)))


def is_half_forked(run: Path) -> bool:
    """Tell whether the copy of the checkpoint that a run was to begin from is not at its end, or broke off."""
    return (run / FORK_MARK).exists()


def is_begun(run: Path) -> bool:
    """Tell whether a folder holds nothing but the beginning of a run: no checkpoint, and no copy of a neighbour's."""
    names = names_in(run)
    kept = [*run.glob("**/step-*/stage-*.json"), *run.glob(SUMMARY_FILE)]
    return bool(names) and (CONFIG_FILE in names or names <= OWN) and not kept


def names_in(run: Path) -> set[str]:
    """List what a folder holds, but for what a kill left of a lock or of a file that was being written."""
    return {path.name for path in run.iterdir() if path.name != LOCK_FILE and path.suffix != ".tmp"} if run.is_dir() else set()


def write_folder(run: Path, config: RunConfig, tokenizer: str | None, step: int, *, must: bool) -> bool:
    """Write settings and tokenizer where they differ from what is there, and note in the history what was changed in a run that goes on.

    Return whether they stand there; raise ValueError if they `must` and cannot.
    """
    changed = changes(run, config)
    files = {CONFIG_FILE: to_toml(config)} | ({} if tokenizer is None else {TOKENIZER_FILE: tokenizer})
    try:
        run.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = run / name
            if not path.is_file() or path.read_bytes() != text.encode():  # a full disk is no reason to fail where nothing changes
                write_atomic(path, text.encode())
        if changed:
            add_to_history(run, {"step": step, "changed": changed})
    except OSError as error:
        problem = f"the settings of the run were not written to {run / CONFIG_FILE}: {shortage(run / CONFIG_FILE, error)}"
        if must:
            raise ValueError(f"{problem}, or choose another --run") from None
        warn(problem)
        return False
    return True


def changes(run: Path, config: RunConfig) -> dict[str, list[Any]]:
    """List the settings that a resume has changed, each with its value before and now."""
    try:
        before, after = flatten(read_config(run / CONFIG_FILE)), flatten(config)
    except ValueError:  # there is none yet
        return {}
    return {name: [before.get(name), after[name]] for name in sorted(TOLD) if before.get(name) != after[name]}


def add_to_history(run: Path, line: dict[str, Any]) -> None:
    """Add a line to the history."""
    with (run / HISTORY_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line}) + "\n")


def write_summary(run: Path, summary: dict[str, Any]) -> None:
    """Write the summary; if the disk has no room, say so: the training is done, and a resume writes it again."""
    data = json.dumps(summary, indent=1).encode()
    try:
        write_atomic(run / SUMMARY_FILE, data)
    except OSError as error:
        reason = shortage(run / SUMMARY_FILE, error, len(data))
        warn(f"{run / SUMMARY_FILE} was not written: {reason}, then --resume validates again and writes it")


def summarised(run: Path) -> int:
    """Return the step up to which a run's summary was written; -1: none was."""
    try:
        steps = json.loads((run / SUMMARY_FILE).read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return -1
    return steps if type(steps) is int else -1


def folder_of(run: Path, replica: int) -> Path:
    """Say where a replica keeps its checkpoints and metrics, on a machine that has all of them."""
    return run / f"replica-{replica}" if replica else run


def kept_by_all(run: Path, replicas: int) -> list[Path]:
    """List the checkpoints in a run folder of which all stages of all replicas have their parts, oldest first."""
    from thinwire import checkpoint  # not at the top: it imports torch, and the command line is read without

    others = [{folder.name for folder in checkpoint.complete(folder_of(run, replica))} for replica in range(1, replicas)]
    return [folder for folder in checkpoint.complete(run) if all(folder.name in names for names in others)]
