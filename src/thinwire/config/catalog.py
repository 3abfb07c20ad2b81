"""What can be named on the command line: codecs, exchanges, link profiles and configs. Nothing of what is named is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

CODECS = {
    "dense": "thinwire.codecs.dense:Dense",
    "subspace": "thinwire.codecs.subspace:Subspace",
    "anchored": "thinwire.codecs.anchored:Anchored",
    "quantize": "thinwire.codecs.quantize:Quantize",
    "topk": "thinwire.codecs.sparsify:TopK",
    "randomk": "thinwire.codecs.sparsify:RandomK",
    "threshold": "thinwire.codecs.threshold:Threshold",
    "autoencoder": "thinwire.codecs.autoencoder:Autoencoder",
    "bottleneck": "thinwire.codecs.bottleneck:Bottleneck",
    "hadamard": "thinwire.codecs.hadamard:Hadamard",
    "lossless": "thinwire.codecs.lossless:Lossless",
    "lowrank": "thinwire.codecs.lowrank:LowRank",
}
"""Codecs of our own, and where each is; those of third parties are found through entry points."""
CODEC_GROUP = "thinwire.codecs"
"""Entry point group of third parties' codecs."""
EXCHANGES = {
    "allreduce": "thinwire.replicas.allreduce:AllReduce",
    "hybrid": "thinwire.replicas.hybrid:Hybrid",
    "powersgd": "thinwire.replicas.powersgd:PowerSGD",
    "threshold": "thinwire.replicas.threshold:Threshold",
    "gravac": "thinwire.replicas.gravac:GraVAC",
    "powergossip": "thinwire.replicas.powergossip:PowerGossip",
    "local": "thinwire.replicas.local:Local",
    "ist": "thinwire.replicas.ist:IndependentSubnets",
}
"""Exchanges between replicas, and where each is."""


def third_party_codecs() -> EntryPoints:
    """Return the entry points of codecs in other packages."""
    from importlib.metadata import entry_points  # not at the top: it is slow to import

    return entry_points(group=CODEC_GROUP)


def codec_names() -> list[str]:
    """List every codec that can be named in a config."""
    return sorted({*CODECS, *(point.name for point in third_party_codecs())})


def config_names() -> list[str]:
    """List the configs that come with the package."""
    return sorted(path.stem for path in (Path(__file__).parent / "packaged").glob("*.toml"))


def listed() -> dict[str, str]:
    """Say for each word that takes a name which names there are."""
    from thinwire.config.profiles import PROFILES

    return {
        "--codec.name": ", ".join(codec_names()),
        "--replicas.exchange": ", ".join(EXCHANGES),
        "--link.profile": f"{', '.join(PROFILES)}, or your own such as 20mbps_30ms",
        "--config": f"{', '.join(config_names())}, or a file that ends in .toml",
    }
