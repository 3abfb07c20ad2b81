"""Independent subnets: dealing out and merging, the subnet as a smaller network, rounds of training, and a checkpoint within one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from helpers import TINY, make_pipeline, random_ids
from thinwire.config.options import options_from_spec
from thinwire.config.sections import ModelConfig, ReplicasConfig, RunConfig, TrainConfig
from thinwire.model.ends import Context
from thinwire.model.stage import Stage
from thinwire.optim.optimizers import StageOptimizer, rate_factor
from thinwire.pipeline.inprocess import Pipeline
from thinwire.replicas.exchange import make_exchange
from thinwire.replicas.ist import deal, gain, keep_block, own_block, partition, put_block, quotas, read_shares, writing_gains
from thinwire.testing.together import together

SMALL = replace(TINY, layers=2, context=6)
EVEN = replace(SMALL, kv_heads=4)


def test_units_are_dealt_out_disjoint_complete_and_anew_each_time():
    dealt = deal(30, [1, 1, 1, 1], 0, 7)
    assert sorted(torch.cat(dealt).tolist()) == list(range(30))
    assert sorted(map(len, dealt)) == [7, 7, 8, 8]
    assert all(torch.equal(part, again) for part, again in zip(dealt, deal(30, [1, 1, 1, 1], 0, 7), strict=True))
    assert not any(torch.equal(part, again) for part, again in zip(dealt, deal(30, [1, 1, 1, 1], 0, 8), strict=True))


@pytest.mark.parametrize(
    "units, shares, expected",
    [(8, [3, 1], [6, 2]), (2, [3, 1], [1, 1]), (3, [9, 1], [2, 1]), (48, [1, 1, 1], [16, 16, 16]), (5, [1, 1, 2], [2, 1, 2])],
)
def test_everyone_gets_at_least_one_unit_and_about_its_share(units, shares, expected):
    assert quotas(units, shares) == expected


@pytest.mark.parametrize("count, shares, expected", [(4, [1] * 4, [4.0] * 4), (3, [1] * 3, [4.0] * 3), (2, [3, 1], [1.0, 4.0])])
def test_what_makes_up_for_missing_columns_is_a_power_of_two(count, shares, expected):
    assert [gain(48, len(part)) for part in deal(48, shares, 0)] == expected
    named = {name: tensor.data for name, tensor in make_pipeline("dense", EVEN, stages=1).stages[0].named_parameters()}
    cuts = partition(named, EVEN, [1, 1], 0, 0)
    columns = {f"layers.{layer}.{name}.weight": 2.0 for layer in range(EVEN.layers) for name in ("attention.output", "ffn.down")}
    assert writing_gains(cuts, EVEN, 0) == columns and len(cuts) == 7 * EVEN.layers  # rows need none


def test_layers_and_rounds_are_dealt_out_independently_and_heads_stay_whole():
    stage = make_pipeline("dense", EVEN, stages=1).stages[0]
    named = dict(stage.named_parameters())
    first, second = (partition(named, EVEN, [1, 1], 0, turn) for turn in (0, 1))
    assert len(first) == 7 * EVEN.layers
    gates = [cuts[f"layers.{layer}.ffn.gate.weight"][0][0].tolist() for cuts in (first, second) for layer in range(EVEN.layers)]
    assert len({tuple(gate) for gate in gates}) == 2 * EVEN.layers
    for layer in range(EVEN.layers):
        branch = f"layers.{layer}.attention"
        for replica in range(2):
            rows = first[f"{branch}.query.weight"][0][replica]
            assert torch.equal(rows, first[f"{branch}.output.weight"][1][replica])
            assert torch.equal(rows, first[f"{branch}.key.weight"][0][replica])
            heads = rows.view(-1, EVEN.head_size)
            assert torch.equal(heads[:, 0] % EVEN.head_size, torch.zeros(2, dtype=torch.int64))
            assert torch.equal(heads - heads[:, :1], torch.arange(EVEN.head_size).expand(2, -1))


def test_blocks_on_two_axes_are_taken_and_put_back():
    matrix = torch.arange(48.0).view(6, 8)
    cut = {0: deal(6, [1, 1], 1), 1: deal(8, [1, 1], 2)}
    block = own_block(matrix, cut, 1)
    assert torch.equal(block, matrix[cut[0][1]][:, cut[1][1]])
    changed = matrix.clone()
    put_block(changed, cut, 1, block + 100)
    assert torch.equal(own_block(changed, cut, 1), block + 100)
    assert (changed != matrix).sum() == block.numel()
    keep_block(changed, cut, 1)
    assert torch.equal(own_block(changed, cut, 1), block + 100) and (changed != 0).sum() == block.numel()


def loss_of(stage: Stage, ids: Tensor) -> Tensor:
    return stage(ids, (), Context(0, torch.arange(len(ids))))[0]


def shrink(stage: Stage, cuts: dict, model: ModelConfig, replica: int) -> None:
    """Make the small network of one replica out of the whole one: matrices without the others' rows and columns."""
    for name, cut in cuts.items():
        module = stage.get_submodule(name.removesuffix(".weight"))
        module.weight = nn.Parameter(own_block(module.weight.detach(), cut, replica))
    for block in stage.layers.values():
        block.attention.kv_heads = block.attention.key.weight.shape[0] // model.head_size
        block.attention.heads = block.attention.query.weight.shape[0] // model.head_size


@pytest.mark.parametrize("model", [SMALL, replace(EVEN, output_bias=True, branch_norm_gains=True)])
def test_zeros_in_place_of_the_others_are_the_smaller_network(model):
    """Its loss and gradients are those of a network that never had the other neurons and heads, whose gradients are exactly zero."""
    whole, small = (make_pipeline("dense", model, stages=1).stages[0] for _ in range(2))
    cuts = partition(dict(whole.named_parameters()), model, [1, 1], 0, 3)
    for name, cut in cuts.items():
        keep_block(whole.get_parameter(name).data, cut, 1)
    shrink(small, cuts, model, 1)
    ids = random_ids(model)
    losses = [loss_of(stage, ids) for stage in (whole, small)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-13)
    for name, parameter in whole.named_parameters():
        gradient, expected = parameter.grad, small.get_parameter(name).grad
        if name in cuts:
            rest = gradient.clone()
            put_block(rest, cuts[name], 1, torch.zeros_like(expected))
            assert not rest.any(), name
            gradient = own_block(gradient, cuts[name], 1)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)


class Replica:
    """A pipeline in one process that trains as the trainer does."""

    def __init__(self, config: RunConfig, peers, codec: str = "dense", stages: int = 1) -> None:
        self.config, self.peers = config, peers
        self.pipeline: Pipeline = make_pipeline(codec, config.model, stages, **({"rank": 6} if codec == "subspace" else {}))
        self.optimizers = [StageOptimizer(stage, config.train) for stage in self.pipeline.stages]
        self.methods = [make_exchange(config, peers, optimizer.named) for optimizer in self.optimizers]

    @property
    def named(self) -> dict[str, Tensor]:
        return {name: parameter.data for optimizer in self.optimizers for name, parameter in optimizer.named.items()}

    def run(self, steps: range, rate: float = 1.0) -> Replica:
        for step in steps:
            self.pipeline.step(random_ids(self.config.model, 2, seed=100 * step + self.peers.index), step, 2 * step)
            for optimizer, method in zip(self.optimizers, self.methods, strict=True):
                optimizer.step(rate * rate_factor(step, self.config.train), 1.0)
                method.commit()
                method.parameters({name: parameter.data for name, parameter in optimizer.named.items()}, optimizer, step)
                method.commit()
        return self

    def foreign(self, turn: int) -> float:
        """Return the largest number among the others' parts, in parameters and moments."""
        largest, shares = 0.0, read_shares(self.methods[0].options.shares, self.peers.count)
        for optimizer in self.optimizers:
            cuts = partition(dict(optimizer.named), self.config.model, shares, self.config.seed, turn)
            tensors = {f"{name}/": parameter.data for name, parameter in optimizer.named.items()} | optimizer.state_tensors()
            for label, tensor in tensors.items():
                cut = cuts.get(label.rpartition("/")[0])
                if cut and tensor.dim() and label.rpartition("/")[2] != "step":
                    rest = tensor.clone()
                    put_block(rest, cut, self.peers.index, torch.zeros_like(own_block(rest, cut, self.peers.index)))
                    largest = max(largest, rest.abs().max().item())
        return largest


def configured(spec: str, model: ModelConfig = SMALL, steps: int = 100, count: int = 2, **train) -> RunConfig:
    return RunConfig(
        seed=3,
        model=model,
        train=TrainConfig(steps=steps, warmup=0, **train),
        replicas=ReplicasConfig(count=count),
        exchange=options_from_spec("exchange", spec),
    )


@pytest.mark.parametrize("graph", ["complete", "0-1,1-2,2-3"])
@pytest.mark.parametrize("moments", ["true", "false"])
def test_a_round_without_learning_changes_no_bit(graph, moments):
    config = configured(f"ist:steps=2,moments={moments}", EVEN, count=4)

    def task(peers):
        replica = Replica(config, peers)
        before = {name: tensor.clone() for name, tensor in replica.named.items()}
        replica.run(range(1), rate=0.0)
        within = replica.foreign(0), not torch.equal(replica.named["layers.0.ffn.up.weight"], before["layers.0.ffn.up.weight"])
        replica.run(range(1, 2), rate=0.0)
        return within, all(torch.equal(tensor, before[name]) for name, tensor in replica.named.items())

    assert together(4, task, graph) == [((0.0, True), True)] * 4


@pytest.mark.parametrize("optimizer", ["shared", "adamw", "muon"])
def test_the_others_parts_stay_away_for_a_round_and_all_replicas_end_it_alike(optimizer):
    config = configured("ist:steps=3,shares=3/1", EVEN, optimizer=optimizer, weight_decay=0.1, steps=8)

    def task(peers):
        replica = Replica(config, peers, "subspace", 2)
        largest = [replica.run(range(step, step + 1)).foreign(step // 3) for step in range(6)]
        sixth = {name: tensor.clone() for name, tensor in replica.named.items()}
        return largest, sixth, replica.run(range(6, 8)).named, [method.meets(step) for method in replica.methods for step in range(8)]

    results = together(2, task)
    for largest, *_, meets in results:
        assert [value == 0 for value in largest] == [True, True, False] * 2
        assert [step % 8 for step, meeting in enumerate(meets) if meeting] == [2, 5, 7] * 2
    for which in (1, 2):
        assert all(torch.equal(tensor, results[1][which][name]) for name, tensor in results[0][which].items())


def test_a_merge_takes_each_part_from_its_owner_and_the_mean_of_the_rest():
    config = configured("ist:steps=3,moments=true", optimizer="adamw")

    def task(peers):
        replica = Replica(config, peers).run(range(2))
        (method,) = replica.methods
        method.parameters = lambda *arguments: None
        replica.run(range(2, 3))
        before = {name: tensor.clone() for name, tensor in replica.named.items()}
        moments = {name: tensor.clone() for name, tensor in replica.optimizers[0].state_tensors().items()}
        del method.parameters
        sent = peers.sent
        method.parameters(replica.named, replica.optimizers[0], 2)
        return before, moments, replica.named, replica.optimizers[0].state_tensors(), peers.sent - sent

    results = together(2, task)
    cuts = partition(results[0][0], config.model, [1, 1], config.seed, 0)
    own = shared = 0
    for name, merged in results[0][2].items():
        assert torch.equal(merged, results[1][2][name])
        if name in cuts:
            for replica, (before, moments, *_) in enumerate(results):
                scale = 2 if name.endswith(("output.weight", "down.weight")) else 1
                assert torch.equal(scale * own_block(merged, cuts[name], replica), own_block(before[name], cuts[name], replica))
                for label in (f"{name}/exp_avg", f"{name}/exp_avg_sq"):
                    assert all(
                        torch.equal(own_block(after[label], cuts[name], replica), own_block(moments[label], cuts[name], replica))
                        for _, _, _, after, _ in results
                    )
            own += merged.numel() // 2
        else:
            torch.testing.assert_close(merged, (results[0][0][name] + results[1][0][name]) / 2)
            shared += merged.nbytes
    # Three numbers of each own weight (itself and two moments), and what two replicas send each other for a mean.
    assert [sent for *_, sent in results] == [3 * own * 8 + shared] * 2


def test_fewer_heads_than_replicas_are_averaged():
    named = {name: tensor.data for name, tensor in make_pipeline("dense", SMALL, stages=1).stages[0].named_parameters()}
    cuts = partition(named, SMALL, [1, 1, 1], 0, 0)
    assert {name.split(".")[2] for name in cuts} == {"ffn"}
    config = configured("ist:steps=2", count=3)
    results = together(3, lambda peers: Replica(config, peers).run(range(2)).named)
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]) and torch.equal(tensor, results[2][name])


@pytest.mark.parametrize("moments", ["true", "false"])
@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_continues_from_its_checkpoint_bit_for_bit(stop, moments):
    """At the end of a round, and within one."""
    config = configured(f"ist:steps=2,moments={moments}", optimizer="adamw", steps=5)

    def broken(peers):
        stopped, again = Replica(config, peers).run(range(stop)), Replica(config, peers)
        for name, tensor in again.named.items():
            tensor.copy_(stopped.named[name])
        again.optimizers[0].load_state_tensors(stopped.optimizers[0].state_tensors())
        again.methods[0].load_state(stopped.methods[0].state)
        return again.run(range(stop, 5)).named

    whole = together(2, lambda peers: Replica(config, peers).run(range(5)).named)
    for one, other in zip(whole, together(2, broken), strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_bad_options_and_another_partition_within_a_round_are_refused():
    for spec, word in (("ist:steps=0", "steps is 0"), ("ist:shares=3/1/1", "2 replicas"), ("ist:shares=3/0", "at least 1")):
        with pytest.raises(ValueError, match=word):
            configured(spec).exchange.check(configured(spec))

    def task(peers):
        replica = Replica(configured("ist:steps=2"), peers).run(range(1))
        within = dict(replica.methods[0].state)
        at_end = dict(replica.run(range(1, 2)).methods[0].state)
        (other,) = Replica(configured("ist:steps=4"), peers).methods
        with pytest.raises(ValueError, match=r"within a round of ist with steps and shares \[2, 1, 1\]"):
            other.load_state(within)
        other.load_state(at_end)
        with pytest.raises(ValueError, match="which ist needs to go on"):
            other.load_state({})

    together(2, task)
