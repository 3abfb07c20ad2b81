"""Hand a run's exported model to the LM Evaluation Harness: `thinwire eval runs/first --tasks lambada_openai`.

The harness is a package of its own (`pip install -c constraints.txt 'lm_eval[hf]'`), looked for only here. It loads the exported folder
with transformers, so what it measures is the plain network, without boundaries; tasks may download their data.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire.config.sections import Device
from thinwire.hf.export import ExportCommand, export
from thinwire.util.device import choose_device

MISSING = "--tasks needs the LM Evaluation Harness, which is not installed; install it with: pip install -c constraints.txt 'lm_eval[hf]'"


def run_tasks(folder: Path, tasks: Sequence[str], limit: int | None, device: Device) -> dict[str, Any]:
    """Return the harness's results, by task, for a run folder or for a Hugging Face folder as it is."""
    if find_spec("lm_eval") is None:
        raise ValueError(MISSING)
    with tempfile.TemporaryDirectory(prefix="thinwire-") as scratch:
        model = folder
        if not (folder / "config.json").is_file():
            model = Path(scratch) / "model"
            export(ExportCommand(run=folder, out=model, sequences=0))
            if not (model / "config.json").is_file():
                raise ValueError(
                    f"{folder} cannot be handed over: its network is no plain Hugging Face one, see `thinwire export {folder} OUT`"
                )
        import lm_eval

        try:
            results = lm_eval.simple_evaluate(
                model="hf", model_args={"pretrained": str(model)}, tasks=list(tasks), limit=limit, device=str(choose_device(device))
            )
        except KeyError as error:  # how the harness says that it does not know a task
            raise ValueError(f"the LM Evaluation Harness does not know {error}; `lm_eval ls tasks` lists its tasks") from error
    return dict(results["results"])
