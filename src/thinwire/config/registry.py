"""Names of things that can be chosen, and where each is: one registry per kind.

A built-in entry is one line: `module:Class` as text and a help line. Nothing is imported until a name is used, so this is the one place
from which a lower layer reaches a higher one. Other packages add names through the entry point group of the kind, a program through
`register`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


class Registry:
    """Things of one kind by name: built in, of other packages, and registered at run time."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, tuple[str, str]]) -> None:
        """Hold for each name where its class is, as `module:Class`, and one line of help."""
        self.kind, self.group, self.built_in = kind, group, built_in
        self.registered: dict[str, tuple[Any, str]] = {}

    def names(self) -> list[str]:
        """List every name, in order."""
        return sorted({*self.built_in, *self.registered, *(point.name for point in self._entry_points())})

    def help(self, name: str) -> str:
        """Return the help line of a name; one of another package tells where it comes from."""
        for entries in (self.built_in, self.registered):
            if name in entries:
                return entries[name][1]
        return next((point.value for point in self._entry_points().select(name=name)), "")

    def load(self, name: str) -> Any:
        """Return the class of a name, importing only its own module; raise ValueError for a name that does not exist."""
        if name in self.built_in:
            return loaded(self.built_in[name][0])
        if name in self.registered:
            place = self.registered[name][0]
            return loaded(place) if isinstance(place, str) else place
        for point in self._entry_points().select(name=name):
            try:
                return point.load()
            except (ImportError, AttributeError) as error:
                raise ValueError(f"the {self.kind} {name!r} of another package, {point.value}, cannot be imported: {error}") from error
        raise ValueError(f"unknown {self.kind} {name!r}; {near_misses(name, self.names())}choose one of {', '.join(self.names())}")

    def register(self, name: str, place: Any, text: str = "") -> None:
        """Add a class, or where it is as `module:Class`; workers know it where it is importable (`importable`)."""
        if name in self.names():
            raise ValueError(f"there is a {self.kind} {name!r} already; choose another name")
        self.registered[name] = place, text

    def importable(self) -> dict[str, str]:
        """Say for registered names where another process finds their classes, as `module:Class`: not those of a notebook."""
        found = {}
        for name, (place, _) in self.registered.items():
            if isinstance(place, str):
                found[name] = place
            elif place.__module__ != "__main__" and "." not in place.__qualname__:
                found[name] = f"{place.__module__}:{place.__qualname__}"
        return found

    def adopt(self, places: Mapping[str, str]) -> None:
        """Take over what another process has registered."""
        self.registered = {name: (place, "") for name, place in places.items()} | self.registered

    def _entry_points(self) -> EntryPoints:
        from importlib.metadata import entry_points  # not at the top: it is slow to import

        return entry_points(group=self.group)


def loaded(place: str) -> Any:
    """Import what `module:Class` names."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def near_misses(name: str, known: Iterable[str]) -> str:
    """Suggest what was probably meant, in front of a list of all."""
    found = difflib.get_close_matches(name[:100], list(known), n=2)
    return f"did you mean {' or '.join(found)}? " if found else ""


CODECS = Registry(
    "codec",
    "thinwire.codecs",
    {
        "dense": ("thinwire.codecs.dense:Dense", "the stream as it is"),
        "subspace": ("thinwire.codecs.subspace:Subspace", "coordinates in one fixed basis that all layers write into"),
        "anchored": ("thinwire.codecs.anchored:Anchored", "difference to what the receiver expects, in a shared basis"),
        "quantize": ("thinwire.codecs.quantize:Quantize", "8 to 1 bits per value"),
        "topk": ("thinwire.codecs.sparsify:TopK", "the largest values of each token"),
        "randomk": ("thinwire.codecs.sparsify:RandomK", "values of each token at random places"),
        "threshold": ("thinwire.codecs.threshold:Threshold", "the values above a threshold that follows their size"),
        "autoencoder": ("thinwire.codecs.autoencoder:Autoencoder", "what a small learnt encoder makes of the stream"),
        "bottleneck": ("thinwire.codecs.bottleneck:Bottleneck", "a learnt narrow layer of the network itself"),
        "hadamard": ("thinwire.codecs.hadamard:Hadamard", "few bits per value after a rotation that spreads outliers"),
        "lossless": ("thinwire.codecs.lossless:Lossless", "the same bits in fewer bytes"),
        "rvq": ("thinwire.codecs.rvq:Rvq", "numbers of learnt vectors, and of what is left over"),
        "delta": ("thinwire.codecs.delta:Delta", "how a sample has changed since both ends last saw it, in few bits"),
        "nothing": ("thinwire.codecs.nothing:Nothing", "no value at all: the control, each stage begins from its own anchors"),
        "lowrank": ("thinwire.codecs.lowrank:LowRank", "two thin factors of each microbatch"),
    },
)
EXCHANGES = Registry(
    "exchange",
    "thinwire.exchanges",
    {
        "allreduce": ("thinwire.replicas.allreduce:AllReduce", "the mean of all gradients"),
        "hybrid": ("thinwire.replicas.hybrid:Hybrid", "gradients in few bits, boundaries in more"),
        "powersgd": ("thinwire.replicas.powersgd:PowerSGD", "gradient matrices as two thin factors"),
        "threshold": ("thinwire.replicas.threshold:ThresholdExchange", "the largest gradients, by a threshold kept for many steps"),
        "gravac": ("thinwire.replicas.gravac:GraVAC", "the largest gradients, as many as pays"),
        "powergossip": ("thinwire.replicas.powergossip:PowerGossip", "differences of neighbours as thin factors, no meeting of all"),
        "local": ("thinwire.replicas.local:Local", "steps alone, then the mean of all changes"),
        "ist": ("thinwire.replicas.ist:IndependentSubnets", "each trains a part of the network, parts are dealt anew"),
    },
)
TRACKERS = Registry(
    "tracker",
    "thinwire.trackers",
    {
        "tensorboard": ("thinwire.metrics.trackers.tensorboard:TensorBoard", "curves in TensorBoard"),
        "trackio": ("thinwire.metrics.trackers.trackio:Trackio", "curves in Trackio"),
        "wandb": ("thinwire.metrics.trackers.wandb:WeightsAndBiases", "curves in Weights & Biases"),
    },
)
ARCHITECTURES = Registry(
    "architecture",
    "thinwire.architectures",
    {
        "llama": ("thinwire.model.llama.architecture:Decoder", "rotary grouped-query attention and SwiGLU; takes every ingredient"),
        "mistral": ("thinwire.model.mistral:make_mistral", "a Llama whose attention has a sliding window"),
        "qwen2": ("thinwire.model.qwen2:make_qwen2", "a Llama with biases on queries, keys and values"),
        "qwen3": ("thinwire.model.qwen3:make_qwen3", "a Llama with norms of queries and keys"),
    },
)
TRANSPORTS = Registry("transport", "thinwire.transports", {"tcp": ("thinwire.link.tcp.transport:TcpTransport", "TCP with mutual TLS 1.3")})
