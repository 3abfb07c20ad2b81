"""Manifests: what a stage's part of a checkpoint is, in JSON that carries its own checksum.

A manifest vouches for its tensors with their size and SHA-256, and for itself with `checksum`; it must be byte for byte what
`encode_manifest` makes of it, so no changed bit passes. Format 1 had neither checksum nor shape: it can be read, and resumed by what
`config.toml` says.
"""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

from thinwire.checkpoint.fields import check_fields, is_flat
from thinwire.config.earlier import earlier_settings
from thinwire.config.options import spec_of
from thinwire.config.sections import RunConfig
from thinwire.config.toml import ADJUSTABLE, RESHAPING, shared_settings
from thinwire.model.cut import StagePlan, cut_layers
from thinwire.util.files import read_small
from thinwire.util.shown import shown

FORMAT = 2
OLD_FORMAT = 1
LONGEST = 1 << 20
"""Most bytes of a manifest."""
OPTIMIZER, EXCHANGE = "optimizer/", "exchange/"
"""What the names of tensors begin with that are no weights: state of the optimizer, and of the exchange with other replicas."""
BASE = "base"
"""The folder of the frozen weights of an adapter run, beside its checkpoints."""
FREE = frozenset({"split", "microbatches"})
"""Facts that may differ when a run is resumed: they are its shape."""


def facts(config: RunConfig, data: str) -> dict[str, Any]:
    """List what a checkpoint must know of its run: settings and data, which a resume keeps, and its shape, which a resume may change."""
    lasting = {name: value for name, value in shared_settings(config).items() if name not in ADJUSTABLE | RESHAPING}
    lasting, exchange = earlier_settings(lasting, config.exchange), spec_of(config.exchange) if config.replicas.count > 1 else ""
    digest = hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()
    ranges = cut_layers(config.model.layers, config.pipeline.stages, config.pipeline.split)
    split = ",".join(str(len(layers)) for layers in ranges)
    found = {"settings": digest, "exchange": exchange, "data": data, "split": split, "microbatches": config.pipeline.microbatches}
    return found | ({"base": config.adapter.base} if config.adapter.rank else {})


def shape_of(facts: dict[str, Any]) -> str:
    """Write the shape of a run, such as 2,2,2,2x8: layers per stage, and microbatches. Equal shapes of one run compute equal bits."""
    return f"{facts['split']}x{facts['microbatches']}"


def tensors_path(folder: Path, index: int) -> Path:
    """Return where the tensors of a stage stand."""
    return folder / f"stage-{index}.safetensors"


def manifest_path(folder: Path, index: int) -> Path:
    """Return where the manifest of a stage stands."""
    return folder / f"stage-{index}.json"


def copies_of(folder: Path) -> Path:
    """Return where a run keeps its neighbours' copies of a checkpoint."""
    return folder.parent.parent / "copies" / folder.name


def base_folder(folder: Path) -> Path:
    """Return where the frozen weights stand that the adapter in a checkpoint belongs to: once, beside all checkpoints of the run."""
    return folder.parent / BASE


def home_of(folder: Path, index: int) -> Path:
    """Return the folder in which a stage's part of a checkpoint stands: its own, or that of the neighbours' copies in the same run."""
    copies = copies_of(folder)
    return copies if not manifest_path(folder, index).exists() and manifest_path(copies, index).exists() else folder


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """Write a manifest with its checksum."""
    body = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "checksum": checksum}, indent=1).encode()


def decode_manifest(data: bytes) -> dict[str, Any]:
    """Read a manifest; refuse one that is not as it was written, or of a format that is known and with fields that are not."""
    if len(data) > LONGEST:
        raise ValueError(f"it has {len(data)} bytes, a manifest has at most {LONGEST}")
    try:
        manifest = json.loads(data)
        # Deep ones are refused before they are written again: that takes time for every value times every level above it.
        again = encode_manifest(manifest) if isinstance(manifest, dict) and is_flat(manifest) else b""
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(manifest, dict):
        raise ValueError("it is not a table")
    if not is_flat(manifest):
        raise ValueError("it is nested too deeply")
    old = manifest.get("format") == OLD_FORMAT and "checksum" not in manifest
    if not old and again != data:
        raise ValueError("it does not match its checksum")
    if manifest.get("format") in (OLD_FORMAT, FORMAT):
        check_fields(manifest, newer=manifest["format"] == FORMAT)
    return manifest


def read_manifest(folder: Path, index: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Read a stage's manifest and refuse one that is damaged, of another format or of another run."""
    path = manifest_path(folder, index)
    try:
        data = read_small(path, LONGEST)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete {folder} and resume from the checkpoint before it") from None
    return checked_manifest(path, index, data, facts)


def checked_manifest(path: Path, index: int, data: bytes, facts: dict[str, Any]) -> dict[str, Any]:
    """Read the bytes of a stage's manifest; refuse them as `read_manifest` does."""
    try:
        manifest = decode_manifest(data)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); delete {path.parent} and resume from the checkpoint before it") from None
    if manifest.get("format") not in (OLD_FORMAT, FORMAT):
        raise ValueError(
            f"{path} has format {shown(repr(manifest.get('format')), 60)}, this version reads {OLD_FORMAT} and {FORMAT}; "
            "use the thinwire that wrote it"
        )
    expected = {"stage": index} | {name: value for name, value in facts.items() if name not in FREE}
    if "settings" not in manifest and "config" in manifest:
        expected.pop("settings", None)  # an earlier one: it hashed what a resume may change too
    if "exchange" not in manifest and expected.pop("exchange", ""):
        expected.pop("settings", None)  # its hash holds the exchange as it was typed, which config.toml has been compared by
    for name, value in expected.items():
        if manifest.get(name) != value:
            raise ValueError(
                f"{path} has {name} {shown(repr(manifest.get(name)), 100)}, this run has {value!r}; "
                "resume with the settings and data of that run"
            )
    return manifest


def whole_manifest(folder: Path, index: int) -> dict[str, Any] | None:
    """Return the manifest of a part that was written to the end; None if there is none, or one that a power cut or a full disk cut off."""
    path = manifest_path(folder, index)
    try:
        return vouched_manifest(path, index, read_small(path, LONGEST))
    except (OSError, ValueError):
        return None


def vouched_manifest(path: Path, index: int, data: bytes | None) -> dict[str, Any] | None:
    """Return the manifest in some bytes if the tensors that it vouches for stand beside it, as many bytes of them as it says."""
    try:
        manifest = checked_manifest(path, index, data or b"", {})
        tensors = tensors_path(path.parent, index).stat()
    except (OSError, ValueError):
        return None
    sound = stat.S_ISREG(tensors.st_mode) and manifest.get("bytes", tensors.st_size) == tensors.st_size
    return manifest if sound else None


def is_part_of(manifest: dict[str, Any], plan: StagePlan) -> bool:
    """Tell whether a part holds just the layers of a stage, in a model cut into as many stages."""
    return (manifest["stage"], manifest["stages"], manifest["layers"]) == (plan.index, plan.count, list(plan.layers))
