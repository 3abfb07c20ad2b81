"""Export a run's checkpoint: `thinwire export runs/first out`.

A plain Hugging Face folder where the network is one, else a folder of our own format and the reason. Needs no GPU and no running
job; weights are made and written a few rows at a time. OUT appears whole or not at all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from thinwire import __version__, checkpoint
from thinwire.checkpoint.manifest import tensors_path
from thinwire.checkpoint.safetensors import write_file, write_shards
from thinwire.config.toml import CONFIG_FILE
from thinwire.hf.adapter import write_adapter
from thinwire.hf.card import write_card
from thinwire.hf.checkpointed import Checkpointed, open_checkpoint
from thinwire.hf.description import CONFIG_JSON, CONTENTS, DTYPES, title_of, to_json
from thinwire.hf.folders import new_folder, refuse_existing
from thinwire.hf.links import copy_file
from thinwire.hf.measure import measure_run
from thinwire.hf.plain import pieces, why_not_plain
from thinwire.hf.push import check_push, push_folder
from thinwire.hf.tied import APART, tied_again, was_untied
from thinwire.hf.tokenizer import kept_description, kept_dtype, write_json, write_tokenizer
from thinwire.run.saved import TOKENIZER_FILE, is_tokenizer_elsewhere
from thinwire.util.files import files_below
from thinwire.util.sizes import read_size

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a run's checkpoint as a plain Hugging Face folder, or say why it is none and write a folder of our own."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run folder that `thinwire train` wrote."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder to make; it must not exist."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Number format of the weights; unset: the run's own, or for an imported run that of the folder it came from."""
    shard_size: str = "2GB"
    """Most bytes per safetensors file; a single larger tensor has a file of its own."""
    step: int | None = None
    """Step of the checkpoint; unset: the newest complete one."""
    adapter: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the adapter of the run alone, as peft does; otherwise the network that base and adapter make."""
    ema: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write the running mean of the weights (--train.ema) in place of the weights."""
    push: str | None = None
    """Repository on the Hugging Face Hub, such as USER/NAME, that gets the folder too; made private if it is not there."""
    sequences: int | None = None
    """Validation sequences for the losses on the card; 0 measures none; unset: as many as the run's validation takes."""


def main(argv: list[str]) -> None:
    """Run the `export` verb."""
    command = tyro.cli(ExportCommand, prog="thinwire export", args=argv, use_underscores=True)
    print(export(command))
    if command.push is not None:
        print(push_folder(command.out, command.push))


def export(command: ExportCommand) -> str:
    """Make the folder; return what to tell the user."""
    refuse_existing(command.out, "the folder")
    if command.push is not None:
        check_push(command.push)
    limit = read_size(command.shard_size, "--shard-size")
    source = open_checkpoint(command.run, command.step, ema=command.ema)
    reason = why_not_plain(source.config)
    if reason and command.dtype:
        raise ValueError(
            f"--dtype {command.dtype} is for plain Hugging Face folders, but {reason}; leave --dtype out for a folder of our own format"
        )
    if command.adapter and (not source.config.adapter.rank or command.dtype):
        what = f"--dtype {command.dtype} is for whole networks" if source.config.adapter.rank else f"{command.run} has no adapter"
        raise ValueError(f"--adapter writes the adapter of a run as it is, but {what}; leave one of them out")
    dtype = source.dtype if command.adapter else chosen_dtype(command, source)
    losses = measure_run(source.config, command.run, source.fill, step=source.step, plain=reason is None, sequences=command.sequences)
    with new_folder(command.out, "the folder") as folder:
        plain = source if reason else tied_again(source)
        if command.adapter:
            hashes = write_adapter(folder, source)
        else:
            hashes = write_own(folder, source) if reason else write_plain(folder, plain, dtype, limit)
        write_card(folder / "README.md", command.out.resolve().name, source, losses, reason or dtype, adapter=command.adapter)
        write_contents(folder, source, reason, hashes)
    title = title_of(source.config.model)
    kind = "is an adapter for peft, beside the model that was imported" if command.adapter else f"is a plain Hugging Face {title} folder"
    kind = kind if reason is None else f"is a thinwire folder and not a plain {title}"
    why = f": {reason}; `thinwire eval` and `thinwire generate` read it" if reason else f" in {dtype}".replace("torch.", "")
    lacking = f"\nnote: without a tokenizer: it is in the run folder of stage 0; copy {TOKENIZER_FILE} into {command.run} and export again"
    lacking = lacking if is_tokenizer_elsewhere(command.run) else ""
    apart = f"\n{APART}" if plain is source and was_untied(source) else ""
    return f"{command.out} {kind}{why}\nstep {source.step}; {losses.describe()}{lacking}{apart}"


def chosen_dtype(command: ExportCommand, source: Checkpointed) -> torch.dtype:
    """Return the format of the weights: the one asked for, else that of an imported folder, else the run's."""
    if command.dtype:
        return DTYPES[command.dtype]
    return kept_dtype(command.run) or source.dtype


def write_plain(folder: Path, source: Checkpointed, dtype: torch.dtype, limit: int) -> dict[str, str]:
    """Write weights, config and tokenizer files; return the sha256 of the weights."""
    model = source.config.model
    hashes = write_shards(folder, pieces(source, dtype), limit)
    tokens = write_tokenizer(source.run, folder, model.context)
    # A run that was imported to train on shorter sequences still is a model of the longer ones: rotary positions have no table to cut.
    longest = (kept_description(source.run) or {}).get("max_position_embeddings") or 0
    write_json(folder / CONFIG_JSON, to_json(model, dtype, tokens, max(model.context, longest)))
    return hashes


def write_own(folder: Path, source: Checkpointed) -> dict[str, str]:
    """Write a run folder without the state of the optimizer; return the sha256 of the weights."""
    for name in (CONFIG_FILE, TOKENIZER_FILE, "summary.json"):
        copy_file(source.run, name, folder)
    place = Path("checkpoints") / source.folder.name
    (folder / place).mkdir(parents=True)
    hashes = {}
    for index, (manifest, part) in enumerate(zip(source.manifests, source.parts, strict=True)):
        path = tensors_path(place, index)
        hashes[path.as_posix()] = write_file(folder / path, [replace(tensor.piece(), name=name) for name, tensor in part.items()])
        sealed = manifest | {"sha256": hashes[path.as_posix()], "bytes": (folder / path).stat().st_size}
        (folder / path).with_suffix(".json").write_bytes(checkpoint.encode_manifest(sealed))
    return hashes


def write_contents(folder: Path, source: Checkpointed, reason: str | None, hashes: dict[str, str]) -> None:
    """Write down where the folder came from, and what every file in it must be."""
    files = [path.relative_to(folder).as_posix() for path in files_below(folder)]
    table = {"format": FORMAT, "thinwire": __version__, "kind": "run" if reason else source.config.model.architecture, "step": source.step}
    table |= {"codec": asdict(source.config.codec), "stages": source.config.pipeline.stages}
    table["files"] = {name: hashes.get(name) or checkpoint.file_sha256(folder / name) for name in files}
    write_json(folder / CONTENTS, table)
