"""Begin a new run where another one stands: `thinwire train --from RUN --run NEW`. The other run is only read."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from thinwire import checkpoint
from thinwire.checkpoint.manifest import BASE
from thinwire.config.sections import RunConfig
from thinwire.config.toml import CONFIG_FILE, to_toml
from thinwire.run.folder import FORK_MARK, HISTORY_FILE, TOKENIZER_FILE, add_to_history
from thinwire.util.disk import shortage
from thinwire.util.files import write_atomic


def fork(source: Path, run: Path, config: RunConfig) -> None:
    """Copy the newest checkpoint of a run, all parts of all replicas, into a new run folder; its settings come last.

    A mark says until then that the folder is half a run.
    """
    folders = [Path(), *(Path(f"replica-{number}") for number in range(1, config.replicas.count))]
    names = [[folder.name for folder in checkpoint.complete(source / each)] for each in folders]
    newest = checkpoint.common(source, names, config.pipeline.stages)
    mark = run / FORK_MARK
    try:
        mark.touch()
        take_back(run)  # of a fork that broke off
        for each in folders:
            copy_checkpoint(source / each / "checkpoints" / newest.name, run / each / "checkpoints" / newest.name)
            base = source / each / "checkpoints" / BASE
            if base.is_dir():
                shutil.copytree(base, run / each / "checkpoints" / BASE)
        if (source / TOKENIZER_FILE).is_file():
            shutil.copyfile(source / TOKENIZER_FILE, run / TOKENIZER_FILE)
        add_to_history(run, {"step": checkpoint.step_of(newest), "from": str(source.absolute())})
        write_atomic(run / CONFIG_FILE, to_toml(config).encode())
        mark.unlink()
    except BaseException as error:
        with suppress(OSError):  # what stays is marked
            take_back(run)
            mark.unlink(missing_ok=True)
        if not isinstance(error, (OSError, shutil.Error)):
            raise
        reason = shortage(run / CONFIG_FILE, error)
        raise ValueError(f"{newest} was not copied to {run}: {reason}, or, if that run goes on meanwhile, try again") from None


def copy_checkpoint(folder: Path, target: Path) -> None:
    """Copy all parts of a checkpoint, a neighbour's from its copies; the new ones say that every worker has them."""
    parts = checkpoint.parts_of(folder, copies=True)
    if parts is None:
        raise FileNotFoundError(f"{folder} has gone")
    target.mkdir(parents=True)
    for part in parts:
        home, index = checkpoint.home_of(folder, part["stage"]), part["stage"]
        for name in (f"stage-{index}.safetensors", f"stage-{index}.json"):
            shutil.copyfile(home / name, target / name)
    checkpoint.vouch(target)


def take_back(run: Path) -> None:
    """Delete what a fork has put into a folder that was free: checkpoints, and the beginning of its history."""
    for home in (*run.glob("replica-*"), run):
        for folder in checkpoint.steps(home):
            shutil.rmtree(folder)
        shutil.rmtree(home / "checkpoints" / BASE, ignore_errors=True)
        for empty in (home / "checkpoints", home):
            with suppress(OSError):  # it is not, or not there
                empty.rmdir()
    (run / HISTORY_FILE).unlink(missing_ok=True)
