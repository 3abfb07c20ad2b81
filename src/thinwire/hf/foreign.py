"""A Hugging Face folder, opened to be read tensor by tensor: every file, name, shape and number format is checked first.

Nothing in it is believed and nothing is unpickled: weights are safetensors or refused unread.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint import combined_sha256, file_sha256
from thinwire.checkpoint.safetensors import CHUNK_BYTES, Stored, list_tensors
from thinwire.config.sections import ModelConfig
from thinwire.config.toml import CONFIG_FILE
from thinwire.hf.description import CONFIG_JSON, CONTENTS, form_of, from_json, read_object
from thinwire.hf.links import has_file
from thinwire.hf.tokenizer import KEPT
from thinwire.model.huggingface import HuggingFace, PlainTensor
from thinwire.model.names import EMBEDDING
from thinwire.model.stage import Stage

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
AGAIN = "download or export the folder again"


@dataclass(frozen=True)
class Foreign:
    """A checked folder: the network it describes and where its tensors are."""

    folder: Path
    model: ModelConfig
    tensors: dict[str, Stored]

    @property
    def form(self) -> HuggingFace:
        """Return the Hugging Face form of the network's architecture."""
        return form_of(self.model)

    def get(self, entry: PlainTensor) -> Tensor:
        """Read a tensor; a bias that the folder does not have is zero."""
        found = self.tensors.get(entry.theirs)
        return torch.zeros(entry.shape) if found is None else found.whole()

    @torch.no_grad()
    def fill(self, stage: Stage) -> None:
        """Copy the weights of an unconstrained stage into it, one tensor at a time."""
        state = stage.state_dict()
        for entry in self.form.tensors(self.model):
            if entry.ours in state:
                state[entry.ours].copy_(self.get(entry))

    def sha256(self) -> str:
        """Hash all weights, by our names; it does not depend on how they are sharded or held."""
        found = {}
        for entry in self.form.tensors(self.model):
            if entry.ours is not None and entry.theirs in self.tensors:
                tensor = self.tensors[entry.theirs]
                digest = hashlib.sha256(f"{tensor.shape} {tensor.code}\n".encode())
                for start, stop in row_blocks(tensor):
                    digest.update(tensor.rows(start, stop).view(-1).view(torch.uint8).numpy().data)
                found[entry.ours] = digest.hexdigest()
        return combined_sha256(found)

    def untied(self) -> Foreign:
        """Return the same network with a head of its own, which is a copy of the embedding."""
        theirs = next(entry.theirs for entry in self.form.tensors(self.model) if entry.ours == EMBEDDING)
        return replace(self, model=replace(self.model, tied_head=False), tensors=self.tensors | {self.form.head: self.tensors[theirs]})

    @property
    def dtype(self) -> torch.dtype:
        """Return the number format that holds all weights exactly."""
        return reduce(torch.promote_types, [tensor.dtype for tensor in self.tensors.values() if tensor.dtype is not None])

    def refuse_rounding(self, dtype: torch.dtype) -> None:
        """Refuse weights that a run in this number format would round."""
        for tensor in self.tensors.values():
            if tensor.dtype is not None and torch.promote_types(tensor.dtype, dtype) != dtype:
                raise ValueError(
                    f"{tensor.path}: {tensor.name} is {tensor.dtype}, but the run holds its weights in {dtype}, which would round them; "
                    "add --train.dtype fp64"
                )


def open_foreign(folder: Path) -> Foreign:
    """Open a folder and check all of it: names, shapes, formats, that weights are numbers, and with `thinwire.json` the sha256."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a Hugging Face model, with config.json and safetensors files")
    if (folder / CONFIG_FILE).is_file() and not (folder / CONFIG_JSON).is_file():
        raise ValueError(f"{folder} is a thinwire folder, not a Hugging Face one; go on with: thinwire train --run {folder} --resume")
    for name in (*KEPT, CONTENTS, INDEX, WEIGHTS):
        has_file(folder, name)
    model = from_json(read_object(folder / CONFIG_JSON), folder / CONFIG_JSON)
    check_contents(folder)
    foreign = Foreign(folder, model, find_tensors(folder))
    check_tensors(foreign)
    return foreign


def check_contents(folder: Path) -> None:
    """Compare every file with the sha256 that `thinwire.json` gives, where there is one."""
    path = folder / CONTENTS
    if not path.is_file():
        return
    files = read_object(path).get("files")
    if not isinstance(files, dict):
        raise ValueError(f"{path} lists no files; {AGAIN}, or delete {CONTENTS} to go without its check")
    for name, digest in files.items():
        if name == "README.md":  # people add to a card
            continue
        if not has_file(folder, plain_name(name, path)):
            raise ValueError(f"{folder / name} is missing, {CONTENTS} lists it; {AGAIN}")
        if file_sha256(folder / name) != digest:
            raise ValueError(f"{folder / name} does not match its sha256 in {CONTENTS}: it is damaged or was changed; {AGAIN}")


def plain_name(name: Any, where: Path) -> str:
    """Return a file name, refusing one that leads elsewhere."""
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{where} names the file {name!r}, which is not in this folder; {AGAIN}")
    return name


def find_tensors(folder: Path) -> dict[str, Stored]:
    """List the tensors of all shards."""
    if (folder / INDEX).is_file():
        return indexed(folder)
    if (folder / WEIGHTS).is_file():
        return list_tensors(folder / WEIGHTS, AGAIN)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder / pickled[0]} holds pickled weights, which can run code when read; it was not opened: load the model in transformers "
            "and write it with save_pretrained, which makes safetensors"
        )
    raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}; {AGAIN}")


def indexed(folder: Path) -> dict[str, Stored]:
    """List the tensors that the index places, each in the shard it names."""
    places = read_object(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{folder / INDEX} has no weight_map; {AGAIN}")
    found: dict[str, Stored] = {}
    for shard in sorted({plain_name(shard, folder / INDEX) for shard in places.values()}):
        if not has_file(folder, shard):
            raise ValueError(f"the shard {folder / shard} is missing, {INDEX} names it; {AGAIN}")
        inside = list_tensors(folder / shard, AGAIN)
        for name in sorted(inside.keys() | {name for name, place in places.items() if place == shard}):
            if name not in inside:
                raise ValueError(f"{folder / INDEX} places {name} in {shard}, which does not hold it; {AGAIN}")
            if places.get(name) != shard:
                raise ValueError(f"{folder / shard} holds {name}, which {INDEX} places in {places.get(name)}; {AGAIN}")
        found |= inside
    return found


def check_tensors(foreign: Foreign) -> None:
    """Refuse tensors that are missing, of another shape or format, or unknown; and biases that our matrices do not have."""
    if foreign.model.layers > len(foreign.tensors):
        raise ValueError(
            f"{foreign.folder} holds {len(foreign.tensors)} tensors, too few for num_hidden_layers {foreign.model.layers} of "
            f"{CONFIG_JSON}; {AGAIN}"
        )
    expected = {entry.theirs: entry for entry in foreign.form.tensors(foreign.model)}
    description = read_object(foreign.folder / CONFIG_JSON)
    for name, entry in expected.items():
        found = foreign.tensors.get(name)
        if found is None:
            if foreign.form.may_lack(name, description):
                continue
            raise ValueError(f"{foreign.folder} lacks the tensor {name} of shape {entry.shape} that {CONFIG_JSON} calls for; {AGAIN}")
        if found.shape != entry.shape:
            raise ValueError(f"{found.path}: {name} has the shape {found.shape}, {CONFIG_JSON} calls for {entry.shape}; {AGAIN}")
        if found.dtype is None or not found.dtype.is_floating_point:
            raise ValueError(
                f"{found.path}: {name} is {found.code}; weights must be F32, BF16, F16 or F64: save the model unquantised in transformers"
            )
        if entry.ours is None and bool(found.whole().any()):
            raise ValueError(
                f"{found.path}: {name} is not zero, and our decoder has biases on its output matrices alone; choose a model without it"
            )
    check_others(foreign, expected)


def check_others(foreign: Foreign, expected: dict[str, PlainTensor]) -> None:
    """Let go of tensors that say nothing new, refuse those that are unknown, and all that hold something else than numbers."""
    for name in filter(foreign.form.is_derived, list(foreign.tensors)):
        del foreign.tensors[name]
    head = foreign.tensors.pop(foreign.form.head, None) if foreign.model.tied_head else None
    for name in sorted(foreign.tensors.keys() - expected.keys()):
        kind = foreign.form.title
        raise ValueError(f"{foreign.tensors[name].path} holds {name}, which a {kind} with this {CONFIG_JSON} does not have; {AGAIN}")
    for tensor in foreign.tensors.values():
        refuse_not_finite(tensor)
    if head is not None:
        refuse_other_head(head, next(foreign.tensors[name] for name, entry in expected.items() if entry.ours == EMBEDDING))


def refuse_not_finite(tensor: Stored) -> None:
    """Refuse weights that are not numbers: every loss would be none either."""
    for start, stop in row_blocks(tensor):
        bad = (~torch.isfinite(tensor.rows(start, stop))).nonzero()
        if len(bad):
            row = ", ".join(map(str, [start + int(bad[0, 0]), *map(int, bad[0, 1:])]))
            raise ValueError(
                f"{tensor.path}: {tensor.name}[{row}] is NaN or infinite, {len(bad)} such values in rows {start} to {stop - 1}; the model "
                f"cannot be trained: {AGAIN}, or take a checkpoint from before it diverged"
            )


def refuse_other_head(head: Stored, embedding: Stored) -> None:
    """Refuse an output head that stands beside a tied embedding and is not equal to it."""
    same = head.shape == embedding.shape and all(
        torch.equal(*(tensor.rows(start, stop).double() for tensor in (head, embedding))) for start, stop in row_blocks(embedding)
    )
    if not same:
        raise ValueError(
            f"{head.path}: {head.name} is another matrix than {embedding.name}, but {CONFIG_JSON} says tie_word_embeddings true, "
            f"one matrix for both; to import it with a head of its own, as transformers then load it, write "
            f'"tie_word_embeddings": false into {CONFIG_JSON}'
        )


def row_blocks(tensor: Stored) -> list[tuple[int, int]]:
    """Cut a matrix into blocks of rows of a few megabytes."""
    count = tensor.shape[0]
    together = max(1, CHUNK_BYTES // (8 * max(1, math.prod(tensor.shape[1:]))))
    return [(start, min(start + together, count)) for start in range(0, count, together)]
