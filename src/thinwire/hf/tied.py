"""A head that was untied at import: whether it still is the embedding, bit for bit, so that an export can tie it again."""

from __future__ import annotations

from dataclasses import replace

import torch

from thinwire.checkpoint.safetensors import Stored
from thinwire.hf.checkpointed import Checkpointed
from thinwire.hf.foreign import row_blocks
from thinwire.hf.tokenizer import kept_notes
from thinwire.model.names import EMBEDDING, HEAD

APART = (
    "note: the folder that this run came from has one matrix for embedding and head; they have been trained apart, so the exported "
    "config.json says tie_word_embeddings false"
)


def was_untied(source: Checkpointed) -> bool:
    """Tell whether a run came from a folder with a tied head and has a head of its own."""
    return kept_notes(source.run).get("tied") is True and not source.config.model.tied_head


def tied_again(source: Checkpointed) -> Checkpointed:
    """Return the checkpoint as one of a tied network, if it was untied at import and head and embedding are still equal."""
    if not was_untied(source) or not same_bits(source.tensors[HEAD], source.tensors[EMBEDDING]):
        return source
    return replace(source, config=replace(source.config, model=replace(source.config.model, tied_head=True)))


def same_bits(first: Stored, second: Stored) -> bool:
    """Compare two tensors by their bits, a few rows at a time; an embedding that is held in coordinates has another shape."""
    if (first.shape, first.code) != (second.shape, second.code):
        return False
    pairs = ((first.rows(start, stop), second.rows(start, stop)) for start, stop in row_blocks(first))
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)
