"""Checkpoints: per stage one safetensors file and one JSON manifest, whole or absent, checked before they are read, never unpickled."""

from thinwire.checkpoint.hashes import combined_sha256, file_sha256, tensor_hashes, weights_sha256
from thinwire.checkpoint.layout import Position, available, common, complete, folder_of, newest, parts_of, proven, step_of, steps
from thinwire.checkpoint.manifest import FORMAT, encode, facts, home_of, read_manifest
from thinwire.checkpoint.reading import load, refuse_mixed
from thinwire.checkpoint.saver import Saver
from thinwire.checkpoint.writing import prune, remove_newer, save, save_stage, vouch

__all__ = [
    "FORMAT",
    "Position",
    "Saver",
    "available",
    "combined_sha256",
    "common",
    "complete",
    "encode",
    "facts",
    "file_sha256",
    "folder_of",
    "home_of",
    "load",
    "newest",
    "parts_of",
    "proven",
    "prune",
    "read_manifest",
    "refuse_mixed",
    "remove_newer",
    "save",
    "save_stage",
    "step_of",
    "steps",
    "tensor_hashes",
    "vouch",
    "weights_sha256",
]
