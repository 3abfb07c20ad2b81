"""ist: each replica trains a subnet of its own for some steps, then all put their parts back together (systems, section 5).

A round of J steps deals the units that the architecture declares (of Llama the FFN neurons and the key/value heads with their query
heads) of every layer out at random, by seed, round and layer, as many to each replica as `shares` says.
Other replicas' parts are set to zero, with their moments. That is the smaller network exactly: a neuron whose rows and column are zero
writes silu(0) 0 = 0, a head without values writes 0, and each of their gradients has one of those zeros as a factor, so it stays away.
At the round's end every part is copied back from its owner, which is all that is sent of it, and what all replicas train (norms,
embedding, head, ends of boundaries; attention too where there are fewer key/value heads than replicas) is averaged.

No replica needs to keep what it sets to zero: its owner has it. The first step of a round sees the whole network, because a partition can
begin only after an update; of that update too, each replica keeps its own part. So validation and checkpoints at the end of a round are of
the whole network, those within one of a subnet. The last step of a run leaves the whole network, the same everywhere.

A branch with 1/n of its neurons or heads writes about 1/n as much, and batch norm, which absorbs that in the published networks, is not
here. So within a round the columns of output and down are multiplied by n, rounded to a power of two: there and back changes no bit.
Chosen on a toy (2 layers of width 32 on bytes of source text, 4 replicas, rounds of 20, AdamW; validation loss after 240 steps, two
seeds): unscaled 2.597 and 2.629, times 2 2.568 and 2.577, times 4 2.563 and 2.554; averaged gradients, at 32 times the traffic, 2.264 and
2.318. On it, sending the moments too changed nothing (2.600 and 2.631 against 2.597 and 2.629) for 2.2 times the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bits.packing import Raw
from thinwire.config.sections import ModelConfig, RunConfig
from thinwire.model.architecture import find_architecture
from thinwire.model.names import split_block_name
from thinwire.model.noise import key
from thinwire.optim.optimizers import StageOptimizer
from thinwire.replicas.allreduce import average, refuse_gaps
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named

Cut = Mapping[int, Sequence[Tensor]]
"""For each axis of a tensor that is dealt out, the indices of every replica."""
PARTITION = "partition"


def quotas(units: int, shares: Sequence[int]) -> list[int]:
    """Say how many units each replica gets: one, and of the others its share, the largest remainders rounded up."""
    assert units >= len(shares), (units, shares)
    exact = [(units - len(shares)) * share / sum(shares) for share in shares]
    counts = [1 + int(part) for part in exact]
    by_remainder = sorted(range(len(shares)), key=lambda replica: int(exact[replica]) - exact[replica])
    for replica in by_remainder[: units - sum(counts)]:
        counts[replica] += 1
    return counts


def deal(units: int, shares: Sequence[int], *keys: int) -> list[Tensor]:
    """Deal units out at random: disjoint sets of indices that together are all of them."""
    order = torch.randperm(units, generator=torch.Generator().manual_seed(key(*keys)))
    return [part.sort().values for part in order.split(quotas(units, shares))]


def own_block(tensor: Tensor, cut: Cut, replica: int) -> Tensor:
    """Copy a replica's part of a tensor."""
    for axis, owned in cut.items():
        tensor = tensor.index_select(axis, owned[replica].to(tensor.device))
    return tensor


def put_block(tensor: Tensor, cut: Cut, replica: int, block: Tensor) -> None:
    """Write a replica's part into a tensor, and leave the rest of it alone."""
    (axis, owned), *others = cut.items()
    places = owned[replica].to(tensor.device)
    if others:
        inner = tensor.index_select(axis, places)
        put_block(inner, dict(others), replica, block)
        block = inner
    tensor.index_copy_(axis, places, block)


def keep_block(tensor: Tensor, cut: Cut, replica: int) -> None:
    """Set all but a replica's part to zero."""
    block = own_block(tensor, cut, replica)
    put_block(tensor.zero_(), cut, replica, block)


def gain(units: int, own: int) -> float:
    """Return what makes up for the units that a replica does not have, as a power of two."""
    return 2.0 ** round(math.log2(units / own))


def partition(named: Named, model: ModelConfig, shares: Sequence[int], seed: int, turn: int) -> dict[str, Cut]:
    """Deal the units of a round out; parameters that are not named belong to everyone."""
    kinds = find_architecture(model.architecture).units(model)
    cuts: dict[str, Cut] = {}
    for name, tensor in named.items():
        layer, inner = split_block_name(name) or (0, "")
        for number, units in enumerate(kinds):
            if inner in units.axes and units.count >= len(shares):
                axis = units.axes[inner]
                size = tensor.shape[axis] // units.count
                dealt = deal(units.count, shares, seed, turn, layer, number)
                cuts[name] = {axis: [(part[:, None] * size + torch.arange(size)).flatten() for part in dealt]}
    return cuts


def writing_gains(cuts: Mapping[str, Cut], model: ModelConfig, replica: int) -> dict[str, float]:
    """Return the gain of each parameter that is dealt out and writes into the stream; what only reads it needs none."""
    writers = find_architecture(model.architecture).writers(model)
    gains = {}
    for name, cut in cuts.items():
        layer_and_inner = split_block_name(name)
        if layer_and_inner is not None and layer_and_inner[1] in writers:
            ((_, owned),) = cut.items()
            gains[name] = gain(sum(map(len, owned)), len(owned[replica]))
    return gains


def read_shares(text: str, count: int) -> list[int]:
    """Read how much of the network each replica trains."""
    words = text.split("/") if text else ["1"] * count
    if len(words) != count or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(
            f"exchange.shares is {text!r}; give each of the {count} replicas (replicas.count) a whole number of at least 1, such as "
            f"{'/'.join(['2'] + ['1'] * (count - 1))}"
        )
    return [int(word) for word in words]


@dataclass(frozen=True, kw_only=True)
class SubnetOptions(ExchangeOptions):
    """How long subnets train alone, and how large they are."""

    steps: int = 20
    """Steps of a round."""
    shares: str = ""
    """How much of the network each replica trains, such as 3/1; unset: the same."""
    moments: bool = False
    """Send the optimizer's moments with the parameters; false: those of a part that a replica did not have before begin at zero."""

    def check(self, config: RunConfig) -> None:
        if self.steps < 1:
            raise ValueError(f"exchange.steps is {self.steps}; choose at least 1, such as 20")
        read_shares(self.shares, config.replicas.count)
        if not find_architecture(config.model.architecture).units(config.model):
            raise ValueError(
                f"the exchange ist deals out heads and neurons, and the architecture {config.model.architecture!r} declares no units; "
                "choose another exchange, such as allreduce"
            )


class IndependentSubnets(Exchange):
    """Let each replica train a subnet of its own."""

    Options = SubnetOptions

    def talks_after(self, step: int) -> bool:
        return (step + 1) % self.options.steps == 0 or step == self.config.train.steps - 1

    @torch.no_grad()
    def parameters(self, named: Named, optimizer: StageOptimizer, step: int) -> None:
        turn, place = divmod(step, self.options.steps)
        if place and not self.talks_after(step):
            return
        # A run that was made longer goes on within a round whose parts are together already: to its end all train the whole network.
        dealt = place == 0 or bool(self.state[PARTITION].any())
        cuts = partition(named, self.config.model, self._shares, self.config.seed, turn) if dealt else {}
        parts = [(named[name], cut) for name, cut in cuts.items()]
        gains = writing_gains(cuts, self.config.model, self.peers.index)
        moments = parted_moments(named, cuts, optimizer)
        if place == 0:
            for tensor, cut in parts + moments:
                keep_block(tensor, cut, self.peers.index)
            for name, factor in gains.items():
                named[name].mul_(factor)
            self.propose(PARTITION, self._about)
        if self.talks_after(step):
            for name, factor in gains.items():
                named[name].div_(factor)
            self._merge(parts + (moments if self.options.moments else []))
            shared = [tensor for name, tensor in named.items() if name not in cuts]
            average(self.peers, shared)
            own = sum(own_block(tensor, cut, self.peers.index).numel() for tensor, cut in parts) + sum(map(Tensor.numel, shared))
            self.figures["subnet"] = own / sum(map(Tensor.numel, named.values()))
            self.propose(PARTITION, torch.zeros_like(self._about))

    def _merge(self, parts: Sequence[tuple[Tensor, Cut]]) -> None:
        """Copy every part from its owner."""
        packing = Raw()
        came = self.peers.gather(packing.pack([own_block(tensor, cut, self.peers.index) for tensor, cut in parts]))
        for replica, data in enumerate(came):
            like = [own_block(tensor, cut, replica) for tensor, cut in parts]
            for (tensor, cut), block in zip(parts, packing.unpack(data, like, replica), strict=True):
                put_block(tensor, cut, replica, block)

    @property
    def _shares(self) -> list[int]:
        return read_shares(self.options.shares, self.peers.count)

    @property
    def _about(self) -> Tensor:
        """Say what a partition depends on beside the seed, for those who continue within a round."""
        return torch.tensor([self.options.steps, *self._shares])

    def load_state(self, state: Named) -> None:
        """Refuse to continue within a round of another partition: parts that nobody owns would stay zero."""
        refuse_gaps("ist", state, {PARTITION: self._about.shape})
        found = state[PARTITION]
        if found.any() and found.tolist() != self._about.tolist():
            raise ValueError(
                f"the checkpoint lies within a round of ist with steps and shares {found.tolist()}, this run has {self._about.tolist()}; "
                "resume with the options of the run that wrote it, or from the end of a round"
            )
        super().load_state(state)


def parted_moments(named: Named, cuts: Mapping[str, Cut], optimizer: StageOptimizer) -> list[tuple[Tensor, Cut]]:
    """Return what the optimizer keeps for each row or column that is dealt out, cut as its parameter is."""
    found = []
    for label, tensor in optimizer.state_tensors().items():
        name = label.rpartition("/")[0]
        if name in cuts and all(tensor.dim() > axis and tensor.shape[axis] == named[name].shape[axis] for axis in cuts[name]):
            found.append((tensor, cuts[name]))
    return found
