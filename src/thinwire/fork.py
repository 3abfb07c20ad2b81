"""Begin a new run where another one stands: `thinwire train --from RUN --run NEW`. The other run is only read."""

from __future__ import annotations

import shutil
from pathlib import Path

from thinwire import checkpoint
from thinwire.config import RunConfig
from thinwire.configfile import CONFIG_FILE, to_toml
from thinwire.disk import shortage
from thinwire.files import write_atomic
from thinwire.runfolder import TOKENIZER_FILE, note


def fork(source: Path, run: Path, config: RunConfig) -> None:
    """Copy the newest checkpoint of a run, all parts of all replicas, into a new run folder; its settings come last."""
    folders = [Path(), *(Path(f"replica-{number}") for number in range(1, config.replicas.count))]
    names = [[folder.name for folder in checkpoint.complete(source / each)] for each in folders]
    newest = checkpoint.common(source, names, config.pipeline.stages)
    try:
        for each in folders:
            target = run / each / "checkpoints" / newest.name
            shutil.rmtree(target, ignore_errors=True)  # of a fork that broke off
            shutil.copytree(source / each / "checkpoints" / newest.name, target)
        if (source / TOKENIZER_FILE).is_file():
            shutil.copyfile(source / TOKENIZER_FILE, run / TOKENIZER_FILE)
        write_atomic(run / CONFIG_FILE, to_toml(config).encode())
        note(run, {"step": checkpoint.step_of(newest), "from": str(source.absolute())})
    except (OSError, shutil.Error) as error:
        reason = shortage(run / CONFIG_FILE, error)
        raise ValueError(f"{newest} was not copied to {run}: {reason}, or, if that run goes on meanwhile, try again") from None
