"""What a run folder holds of checkpoints: every manifest is read once, and all questions are answered from there.

Whose parts are whole, from which checkpoints some stages can be loaded, and of which step all workers are known to have had one. With
`copies` the neighbours' parts that are kept here count too: to use a model, not to vote on how to go on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.checkpoint.hashes import file_sha256
from thinwire.checkpoint.manifest import LONGEST, copies_of, is_part_of, tensors_path, vouched_manifest
from thinwire.model.cut import StagePlan
from thinwire.util.checkpoint_name import checkpoints_in
from thinwire.util.files import read_matching

PART_NAME = re.compile(r"stage-(\d+)\.json")
Manifests = dict[int, dict[str, Any]]
"""Of the whole parts of one checkpoint, by stage."""


@dataclass(frozen=True)
class Survey:
    """The whole parts of all checkpoints, oldest first, as they stood when they were read."""

    parts: dict[Path, Manifests]

    def complete(self) -> list[Path]:
        """List the checkpoints of which all parts are here, in whatever shape."""
        return [folder for folder, found in self.parts.items() if all_parts(found) is not None]

    def available(self, plans: Sequence[StagePlan], *, verify: bool = False) -> list[str]:
        """Name the checkpoints that some stages can be loaded from here: their own parts, or all parts of another shape.

        With `verify` the tensors' bytes are hashed too, so that a damaged one is passed over.
        """
        names = []
        for folder, found in self.parts.items():
            fitting = [found[plan.index] for plan in plans if plan.index in found and is_part_of(found[plan.index], plan)]
            needed = fitting if len(fitting) == len(plans) else all_parts(found)
            if needed is not None and (not verify or all(is_undamaged(folder, manifest) for manifest in needed)):
                names.append(folder.name)
        return names

    def proven(self) -> int:
        """Return the newest step of which the parts here say that every worker had a checkpoint; -1: none was ever whole everywhere."""
        # An earlier release did not say: then there was one, and to begin again would be wrong.
        every = [part for found in self.parts.values() for part in found.values()]
        return max((part["everyone"] if "everyone" in part else part["step"] for part in every), default=-1)


def survey(run: Path, *, copies: bool = False) -> Survey:
    """Read what a run folder holds."""
    folders = checkpoints_in(run / "checkpoints")
    return surveyed(folders, read_matching([*folders, *(map(copies_of, folders) if copies else ())], "stage-*.json", LONGEST))


def survey_of(folder: Path, *, copies: bool = False) -> Manifests:
    """Read what one checkpoint holds."""
    texts = read_matching([folder, *([copies_of(folder)] if copies else [])], "stage-*.json", LONGEST)
    return surveyed([folder], texts).parts[folder]


def surveyed(folders: Sequence[Path], texts: dict[Path, dict[Path, bytes | None]]) -> Survey:
    """Judge the manifests of some checkpoints by what was read of them, and of their copies if these were read too."""
    parts: dict[Path, Manifests] = {}
    for folder in folders:
        found: dict[int, Path] = {}
        for home in (folder, copies_of(folder)):  # a part of this run's own goes before a copy, even if it is damaged
            for path in texts.get(home, ()):
                if match := PART_NAME.fullmatch(path.name):
                    found.setdefault(int(match[1]), path)
        read = {index: vouched_manifest(path, index, texts[path.parent][path]) for index, path in sorted(found.items())}
        parts[folder] = {index: manifest for index, manifest in read.items() if manifest is not None}
    return Survey(parts)


def all_parts(found: Manifests) -> list[dict[str, Any]] | None:
    """Return the manifests of a checkpoint if all its parts are there."""
    parts = [found[index] for index in sorted(found)]
    return parts if parts and len(parts) == parts[0]["stages"] and parts[-1]["stage"] == len(parts) - 1 else None


def parts_of(folder: Path, *, copies: bool = False) -> list[dict[str, Any]] | None:
    """Return the manifests of all parts of a checkpoint if all are here and whole, in whatever shape."""
    return all_parts(survey_of(folder, copies=copies))


def is_undamaged(folder: Path, manifest: dict[str, Any]) -> bool:
    """Tell whether a part's tensors are those that its manifest vouches for."""
    return file_sha256(tensors_path(folder, manifest["stage"])) == manifest["sha256"]
