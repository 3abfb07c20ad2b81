"""SHA-256 of files and of weights; those of weights do not depend on where the model is cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn


def file_sha256(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_hashes(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Hash every tensor of some stages, by global name."""
    hashes = {}
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            hashes[name] = digest.hexdigest()
    return hashes


def combined_sha256(hashes: Mapping[str, str]) -> str:
    """Hash names and hashes of tensors in the order of their names: it does not depend on the cut."""
    return hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def weights_sha256(modules: Iterable[nn.Module]) -> str:
    """Hash the weights of stages."""
    return combined_sha256(tensor_hashes(modules))
