"""Start a run from a Hugging Face folder: `thinwire import FOLDER --run runs/mine`, then `thinwire train --run runs/mine --resume`.

The run stands at step 0 with the folder's weights and a fresh optimizer. Its [model] is the folder's, its codec `dense` unless one is
named, everything else comes from --config and the options of `thinwire train`. Stages are made one at a time. The run folder appears whole
or not at all.

A tied head becomes a matrix of its own where embedding and head lie on different stages, and is told of.

The folder's tokenizer and generation files are kept in the run's folder `imported` and go out again with `thinwire export`. So does its
max_position_embeddings, even if `--model.context N` trains on shorter sequences: rotary positions have no table that would be cut.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from thinwire import checkpoint
from thinwire.checkpoint import Position
from thinwire.config.command_line import DEFAULT_CONFIG, parse_config, scan
from thinwire.config.options import choose_options
from thinwire.config.registry import CODECS
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.config.toml import CONFIG_FILE, load_config, to_toml
from thinwire.data.open import open_data
from thinwire.hf.adapter import PeftAdapter, open_adapter
from thinwire.hf.checkpointed import open_checkpoint
from thinwire.hf.description import CONFIG_JSON, read_object
from thinwire.hf.folders import new_folder, refuse_existing
from thinwire.hf.foreign import Foreign, open_foreign
from thinwire.hf.links import copy_file
from thinwire.hf.measure import measure_losses
from thinwire.hf.plain import lean_codec, plans_of, why_not_plain
from thinwire.hf.project import Projection
from thinwire.hf.tokenizer import keep
from thinwire.model.adapter import adapt
from thinwire.model.adapter_targets import target_layers
from thinwire.model.cut import constrained_layers
from thinwire.model.stage import Stage, build_stage
from thinwire.model.subspace.stream import SubspaceStream
from thinwire.optim.optimizers import StageOptimizer
from thinwire.pipeline import by_stage as staged
from thinwire.pipeline.inprocess import build_codec
from thinwire.run.check import check, resolve
from thinwire.run.evaluate import validation_batch
from thinwire.run.saved import TOKENIZER_FILE
from thinwire.util.checkpoint_name import checkpoint_name

OURS_TO_CHOOSE = ("context", "free_layers", "dropout", "output_dropout", "separator")
"""Settings of [model] that change no weight, so that they need not be the folder's."""
REFUSED = {
    "resume": "an imported run is new",
    "track": "nothing is trained yet",
    "data.tokenizer": "the run uses the tokenizer of the folder",
}
"""Options of `thinwire train` that make no sense here, and why."""
UNTIED = (
    "note: the folder has one matrix for embedding and head (tie_word_embeddings), and these are on different stages: the head has become "
    "a copy of the embedding, and each is trained on its own. As long as they are equal, export writes one matrix again"
)


def main(argv: list[str]) -> None:
    """Run the `import` verb."""
    own = argparse.ArgumentParser(
        prog="thinwire import",
        allow_abbrev=False,
        description="Start a run from a Hugging Face folder. All the options of `thinwire train` can follow; --model.context N trains "
        "on shorter sequences than the folder's max_position_embeddings.",
    )
    own.add_argument("folder", type=Path, help="folder with config.json, safetensors files and tokenizer.json")
    own.add_argument("--run", type=Path, required=True, help="run folder to make")
    own.add_argument("--adapter", type=Path, help="folder of an adapter of peft to go on with; its rank, alpha and targets are taken over")
    own.add_argument("--project", action="store_true", help="with --codec.name subspace: project the weights, which changes the network")
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        raise ValueError(
            f"the first thing after `thinwire import` is the folder, not {argv[0]}; write: thinwire import FOLDER --run DIR ..."
        )
    mine, options = own.parse_known_args(argv)
    for line in import_folder(mine.folder, mine.run, options, project=mine.project, adapter=mine.adapter):
        print(line)


def import_folder(folder: Path, run: Path, options: list[str], *, project: bool = False, adapter: Path | None = None) -> list[str]:
    """Make the run folder; return what to tell the user."""
    refuse_existing(run, "the run folder")
    foreign = open_foreign(folder)
    trained = None if adapter is None else open_adapter(adapter, foreign.model)
    config = imported_settings(foreign, run, options, trained)
    notes, tied = foreign.form.notes(read_object(folder / CONFIG_JSON)), foreign.model.tied_head
    if tied and not config.model.tied_head:
        foreign, notes = foreign.untied(), [*notes, UNTIED]
    if config.adapter.rank:
        config = with_base(config, foreign)
        notes = [*notes, *adapter_notes(config, foreign)]
    fill, said = chosen_fill(foreign, config, project)
    said = [*notes, *said]
    # The copy in the run folder is not there yet.
    here = replace(config.data, tokenizer=str(folder / TOKENIZER_FILE)) if (folder / TOKENIZER_FILE).is_file() else config.data
    data = open_data(here, config.model, config.seed)
    print("thinwire: checking the imported model by its validation loss; this takes a while", file=sys.stderr)
    windows_NT1 = validation_batch(data, config.train.validation_sequences, config.microbatch)
    if project:
        before = staged.evaluate_by_stage(unbound(config), windows_NT1, foreign.fill, step=0, boundaries=False)
        said.append(f"validation loss {before:.4f} before projection, of the folder's own network; {len(windows_NT1)} sequences")
    with new_folder(run, "the run folder") as made:
        (made / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
        keep(folder, made, foreign.dtype, tied)
        if data.tokenizer_json is not None and not copy_file(folder, TOKENIZER_FILE, made):
            (made / TOKENIZER_FILE).write_text(data.tokenizer_json, encoding="utf-8")
        write_start(made, config, fill, data.fingerprint, trained)
        losses = measure_losses(config, windows_NT1, open_checkpoint(made).fill, step=0, plain=True)
        said.append(("after projection: " if project else "") + losses.describe("the boundaries of the run"))
    return [*said, f"{run} is a run at step 0; train it with: thinwire train --run {run} --resume"]


def imported_settings(foreign: Foreign, run: Path, argv: list[str], trained: PeftAdapter | None = None) -> RunConfig:
    """Put the settings of the run together and check them."""
    given = scan(argv)
    for option, advice in REFUSED.items():
        if option in given and (option != "data.tokenizer" or (foreign.folder / TOKENIZER_FILE).is_file()):
            raise ValueError(f"--{option} {given[option] or ''} does not go with `thinwire import`: {advice}; leave it out")
    base = load_config(given.get("config") or DEFAULT_CONFIG)
    base = replace(base, model=foreign.model, codec=choose_options("codec", base.codec, given.get("codec.name") or "dense"))
    config = parse_config(argv, base if trained is None else replace(base, adapter=trained.settings))
    refuse_other_adapter(config, trained)
    if config.replicas.count > 1:
        raise ValueError(f"replicas.count is {config.replicas.count}, but an import writes the checkpoint of one replica; leave it at 1")
    if "model.tied_head" not in given and must_untie(config):
        config = replace(config, model=replace(config.model, tied_head=False))
    refuse_other_model(foreign, config.model)
    if (foreign.folder / TOKENIZER_FILE).is_file():
        config = replace(config, data=replace(config.data, tokenizer=str(run.resolve() / TOKENIZER_FILE)))
    elif config.data.tokenizer == "train" and not config.data.source.endswith(".bin"):
        raise ValueError(
            f"{foreign.folder} has no {TOKENIZER_FILE}, and the model knows no other tokens; write one with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), give --data.tokenizer, or token shards as --data.source"
        )
    check(config)
    return resolve(config)


def refuse_other_adapter(config: RunConfig, trained: PeftAdapter | None) -> None:
    """Refuse another shape for an adapter that is there, and a hash of the base that was typed."""
    if config.adapter.base:
        raise ValueError(f"adapter.base is {config.adapter.base!r}; the import finds it out: leave --adapter.base out")
    for name in ("rank", "alpha", "targets"):
        ours = getattr(config.adapter, name)
        if trained is not None and ours != (theirs := getattr(trained.settings, name)):
            raise ValueError(f"adapter.{name} is {ours}, but the adapter in {trained.folder} has {theirs}; leave --adapter.{name} out")


def with_base(config: RunConfig, foreign: Foreign) -> RunConfig:
    """Return the settings with the hash of the weights that stay, and how these are held."""
    form = config.adapter.base_format or ("bf16" if foreign.dtype == torch.bfloat16 else "full")
    return replace(config, adapter=replace(config.adapter, base_format=form, base=foreign.sha256()))


def adapter_notes(config: RunConfig, foreign: Foreign) -> list[str]:
    """Say what is trained, and what the frozen weights lose by how they are held."""
    adapter, targets = config.adapter, ", ".join(target_layers(config.model, config.adapter).values())
    said = [
        f"the folder's weights stay as they are, held in {adapter.base_format}; adapters of rank {adapter.rank} on {targets} are trained"
    ]
    exact = {"full": True, "bf16": foreign.dtype == torch.bfloat16, "int8": False}[adapter.base_format or "full"]
    rounding = f"note: {adapter.base_format} rounds the folder's weights ({foreign.dtype}); --adapter.base_format full does not"
    return said if exact else [*said, rounding.replace("torch.", "")]


def must_untie(config: RunConfig) -> bool:
    """Tell whether embedding and head of a run are better two matrices: they lie on two stages, or one is held in coordinates."""
    return config.model.tied_head and (config.pipeline.stages > 1 or CODECS.load(config.codec.name).constrains)


def refuse_other_model(foreign: Foreign, model: ModelConfig) -> None:
    """Refuse a setting of the network that is not the folder's."""
    for entry in fields(ModelConfig):
        ours, theirs = getattr(model, entry.name), getattr(foreign.model, entry.name)
        if entry.name == "tied_head" and theirs:  # a tied head can become one of its own
            continue
        if entry.name not in OURS_TO_CHOOSE and ours != theirs:
            raise ValueError(
                f"model.{entry.name} is {ours}, but the model in {foreign.folder} has {theirs}; leave --model.{entry.name} out"
            )


def chosen_fill(foreign: Foreign, config: RunConfig, project: bool) -> tuple[Callable[[Stage], None], list[str]]:
    """Return how stages get their weights, and what to say of it; refuse codecs that would make another network of the model."""
    codec, name = lean_codec(config), config.codec.name
    reason = why_not_plain(config)
    if reason:
        raise ValueError(
            f"{foreign.folder} cannot be imported for the codec {name!r}: {reason}; choose another, such as --codec.name dense"
        )
    foreign.refuse_rounding(codec.compute)
    if not codec.constrains:
        if project:
            raise ValueError(f"--project is for the codec subspace, but the codec is {name!r}, which takes any weights; leave it out")
        return foreign.fill, []
    plans = plans_of(config)
    stream = codec.stream(plans[0])
    assert isinstance(stream, SubspaceStream)
    rank, width = stream.basis_DK.shape[1], config.model.width
    if not project:
        raise ValueError(
            f"the codec {name!r} holds only what lies in {rank} of {width} directions, so the import would not be exact; choose dense or "
            "quantize, or add --project to project the weights: that changes the network, and the loss before and after is reported"
        )
    projection = Projection(foreign, stream, constrained_layers(config.model, [plan.layers for plan in plans]))
    return projection.fill, [
        f"projected to {rank} of {width} directions, which hold {projection.kept:.1%} of what the embedding and the constrained layers "
        "write; this is not exact. A larger --codec.rank and a smaller --codec.fixed_scale lose less"
    ]


def unbound(config: RunConfig) -> RunConfig:
    """Return the settings of the same network without a codec's constraint."""
    return replace(config, codec=choose_options("codec", config.codec, "dense"))


def write_start(made: Path, config: RunConfig, fill: staged.Fill, fingerprint: str, trained: PeftAdapter | None = None) -> None:
    """Write the checkpoint of step 0, one stage in memory at a time, with the facts that a resume compares.

    With an adapter the weights go into the folder of frozen ones, and the checkpoint has the adapter alone.
    """
    facts = checkpoint.facts(config, fingerprint)
    folder = made / "checkpoints" / checkpoint_name(0)
    folder.mkdir(parents=True)
    codec, ranges = build_codec(config), [plan.layers for plan in plans_of(config)]
    for index in range(len(ranges)):
        stage = build_stage(config.model, ranges, index, codec, config.seed)
        fill(stage)
        if config.adapter.rank:
            adapt(stage, config.adapter)
            checkpoint.save_base(checkpoint.base_folder(folder), stage, facts)
        if trained is not None:
            trained.fill(stage)
        checkpoint.save_stage(folder, stage, StageOptimizer(stage, config.train), Position(0, 0.0), facts)
