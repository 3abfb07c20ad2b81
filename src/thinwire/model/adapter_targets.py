"""Which linear layers an adapter is for: asked of the architecture, called by their Hugging Face names. Free of torch."""

from __future__ import annotations

from thinwire.config.sections import AdapterConfig, ModelConfig
from thinwire.model.architecture import find_architecture
from thinwire.model.names import block_name

ALL = "all-linear"
"""What peft calls all linear layers of the blocks."""


def linear_names(model: ModelConfig) -> dict[str, str]:
    """Return the linear layers of a block: our name inside it, and the last word of the Hugging Face name, or ours where there is none."""
    architecture = find_architecture(model.architecture)
    tensors = architecture.huggingface.tensors(model) if architecture.huggingface is not None else []
    theirs = {entry.ours: entry.theirs.split(".")[-2] for entry in tensors if entry.ours is not None and entry.theirs.endswith(".weight")}
    return {name: theirs.get(block_name(0, f"{name}.weight"), name) for name in architecture.linear_layers(model)}


def target_layers(model: ModelConfig, adapter: AdapterConfig) -> dict[str, str]:
    """Return the linear layers of each block that get an adapter, by both names; refuse a target that there is not."""
    known = linear_names(model)
    if not known:
        raise ValueError(
            f"adapter.rank is {adapter.rank}, but the architecture {model.architecture!r} names no linear layers for adapters; train all "
            "weights (--adapter.rank 0), or choose another architecture"
        )
    if adapter.targets == ALL:
        return known
    wanted = [word.strip() for word in adapter.targets.split(",")]
    for word in wanted:
        if word not in known.values():
            raise ValueError(
                f"adapter.targets names {word!r}; the linear layers of a {model.architecture} block are {', '.join(known.values())}: "
                f"choose some of them with commas, or {ALL}"
            )
    return {ours: theirs for ours, theirs in known.items() if theirs in wanted}
