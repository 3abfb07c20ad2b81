"""Look at the files and folders that a run needs before anything is started for it: what is wrong is told at once, and once."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from thinwire.config.sections import RunConfig
from thinwire.data.open import source_files
from thinwire.data.tokenize import check_fits, load_tokenizer
from thinwire.model.architecture import find_architecture
from thinwire.model.cut import cut_layers

FULL = (errno.ENOSPC, errno.EDQUOT)
WEIGHT_BYTES = 2
"""Memory that a weight takes at the very least: fp32, and a codec that constrains the network leaves half of them out."""


def check_inputs(config: RunConfig, run: Path, *, reads_data: bool = True, stages: int | None = None) -> None:
    """Raise ValueError for data that is not there, a folder that cannot be written to, or a model that this machine cannot hold.

    `stages` is how many stages are here; None: all, of every replica.
    """
    if reads_data:
        check_data(config)
    if config.adapter.rank and not config.adapter.base:
        raise ValueError(
            f"adapter.rank is {config.adapter.rank}, and {run} has no weights to freeze; an adapter run begins with: thinwire import "
            f"FOLDER --run DIR --adapter.rank {config.adapter.rank} ..., or train all weights (--adapter.rank 0)"
        )
    check_folder(run, "run folder", "--run")
    check_memory(config, stages)
    if config.memory.folder is not None:
        check_folder(Path(config.memory.folder), "folder to offload to", "--memory.folder")


def check_data(config: RunConfig) -> None:
    """Refuse a source or a tokenizer that is not there, or a cache that cannot be written to; nothing is fetched."""
    data, name = config.data, config.data.tokenizer
    is_text = not any(path.suffix == ".bin" for path in source_files(data))
    if name != "train" and (not name.startswith("hf:") or os.path.exists(os.path.expanduser(name.removeprefix("hf:")))):
        check_fits(load_tokenizer(name), name, config.model.vocabulary)
    if is_text:
        check_folder(Path(os.path.expanduser(data.cache)), "cache", "--data.cache")


def check_memory(config: RunConfig, stages: int | None) -> None:
    """Refuse a model whose weights alone are larger than the memory of this machine; with a budget the plan decides."""
    memory = physical_memory()
    if memory is None or config.memory.budget is not None:
        return
    model, ranges = config.model, cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    layers = min(map(len, ranges))
    count = partial(find_architecture(model.architecture).count, model)
    whole = count(model.layers)
    here = whole * config.replicas.count if stages is None else stages * (count(layers) - count(0))
    if WEIGHT_BYTES * here > memory:
        raise ValueError(
            f"the model has {whole:,} weights: what is here of them takes more than {WEIGHT_BYTES * here / 1e9:,.0f} GB, this machine has "
            f"{memory / 1e9:,.0f} GB; choose a smaller model.width, model.ffn, model.vocabulary or model.layers, spread it over more "
            "machines (thinwire join), or set --memory.budget"
        )


def physical_memory() -> int | None:
    """Return the bytes of memory of this machine, where the system says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def check_folder(folder: Path, what: str, option: str) -> None:
    """Refuse a folder that is none, or that cannot be made or written to; what is made to find out goes again."""
    made: list[Path] = []
    try:
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in FULL:  # a full disk costs a checkpoint, not the run
            return
        shown = str(folder) if len(str(folder)) <= 200 else f"{str(folder)[:200]}..."
        raise ValueError(f"the {what} {shown} cannot be written to: {error.strerror}; choose another with {option} DIR") from None
    finally:
        for each in made:
            with suppress(OSError):
                each.rmdir()
