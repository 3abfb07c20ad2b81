"""Checkpoints: per stage one safetensors file and one JSON manifest, whole or absent, checked before they are read, never unpickled."""

from thinwire.checkpoint.hashes import combined_sha256, file_sha256, tensor_hashes, weights_sha256
from thinwire.checkpoint.layout import Position, checkpoint_folder, common, complete, newest, steps
from thinwire.checkpoint.manifest import FORMAT, base_folder, encode_manifest, facts, home_of, read_manifest
from thinwire.checkpoint.reading import load_stages, refuse_mixed
from thinwire.checkpoint.saver import Saver
from thinwire.checkpoint.survey import Survey, parts_of, survey
from thinwire.checkpoint.writing import prune, remove_newer, save, save_base, save_stage, vouch
from thinwire.util.checkpoint_name import step_of

__all__ = [
    "FORMAT",
    "Position",
    "Saver",
    "Survey",
    "base_folder",
    "checkpoint_folder",
    "combined_sha256",
    "common",
    "complete",
    "encode_manifest",
    "facts",
    "file_sha256",
    "home_of",
    "load_stages",
    "newest",
    "parts_of",
    "prune",
    "read_manifest",
    "refuse_mixed",
    "remove_newer",
    "save",
    "save_base",
    "save_stage",
    "step_of",
    "steps",
    "survey",
    "tensor_hashes",
    "vouch",
    "weights_sha256",
]
