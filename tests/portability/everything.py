"""Import every module, train in one process, within a memory budget and in workers; print the summaries as JSON. For a shimmed Python."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pkgutil
import sys
from pathlib import Path

import thinwire

EXTRAS = {"trackio", "tensorboard", "datasets", "transformers", "huggingface_hub", "matplotlib", "lm_eval", "zfpy", "wandb"}
ONE = ("--pipeline.stages", "1")
RUNS = {
    "in process": (),
    "resumed": (),
    "budget": (*ONE, "--memory.budget", "1GB"),
    "workers": ("--pipeline.mode", "workers"),
}


def import_all() -> int:
    """Import every module, but those that need an extra which is not installed; return how many."""
    names = [module.name for module in pkgutil.walk_packages(thinwire.__path__, "thinwire.") if not module.name.endswith("__main__")]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in EXTRAS:
                raise
    return len(names)


def main(config: str, folder: Path) -> None:
    from memory.forced import force
    from thinwire.cli import main as cli

    count, summaries = import_all(), {}
    for name, words in RUNS.items():
        run = folder / name.replace(" ", "_")
        if name == "budget":
            force("o")
        if name == "resumed":
            run = folder / "in_process"
            given = ["train", "--run", str(run), "--resume", "--train.steps", "8"]
        else:
            given = ["train", "--config", config, "--run", str(run), "--train.threads", "1", *words]
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(given) == 0, name
        summaries[name] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    print(json.dumps({"modules": count, "runs": summaries}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
