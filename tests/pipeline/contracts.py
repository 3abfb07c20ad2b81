"""What `pipeline/protocols.py` promises, stated once: each function makes the calls of a protocol and checks what comes of them.

All calls are collective, so a contract takes the sides of all processes of a run: one, or several.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from patience import HANG, wait_until
from thinwire.checkpoint import Position
from thinwire.link.errors import LinkError
from thinwire.link.message import fields, whole
from thinwire.pipeline.outcome import Outcome
from thinwire.pipeline.protocols import Abandoned, Compute, Group
from thinwire.run.keeping import Keeper

Side = TypeVar("Side")
WORD = fields({"worker": whole(0, 100)})


def together(sides: Sequence[Side], call: Callable[[Side], Any]) -> list[Any]:
    """Make a call for every process at the same time; return what each returned, or the exception that it raised."""
    results: dict[int, Any] = {}

    def run(number: int, side: Side) -> None:
        try:
            results[number] = call(side)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(sides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert len(results) == len(sides), "a call did not return"
    return [results[number] for number in range(len(sides))]


# Compute --------------------------------------------------------------------------------------------------------------------------------


def observe(compute: Compute, batch_BT1: Tensor | None, rows: int, context: int) -> dict[str, Any]:
    """Make every call of the protocol in one process; return what was seen. The codec changes what is shared after step 1, not step 0."""
    stages, first_batch = compute.stages, batch_BT1
    seen: dict[str, Any] = {"stages": [stage.plan.index for stage in stages], "microbatch": compute.microbatch}
    weights = {name: each.detach().clone() for stage in stages for name, each in stage.named_parameters()}
    seen["evaluated first"] = compute.evaluate(first_batch, rows, 0)
    seen["gradients after evaluation"] = any(each.grad is not None for stage in stages for each in stage.parameters())
    seen["counted by evaluation"] = counts(compute)
    seen["loss"] = compute.step(batch_BT1, 0, 0)
    once = gradients_of(compute)
    seen["counted once"] = counts(compute)
    seen["figures"] = compute.figures(1.0)
    seen["loss again"] = compute.step(batch_BT1, 0, 0)
    twice = gradients_of(compute)
    seen["gradients"] = sorted(once)
    seen["accumulates"] = once.keys() == twice.keys() and all(torch.allclose(twice[name], 2 * once[name], rtol=1e-9) for name in once)
    seen["weights stay"] = all(torch.equal(weights[name], each) for stage in stages for name, each in stage.named_parameters())
    seen["counted twice"] = counts(compute)
    seen["links"] = [each["links"] for each in compute.totals()]
    seen["in flight"] = compute.bound_in_flight(None)
    seen["bounded"] = compute.bound_in_flight([1] * len(stages))
    versions = [stage.stream.version for stage in stages]
    seen["rotations after step 0"], before = len(compute.update_shared(0, 1.0)), shared_of(compute)
    compute.step(batch_BT1, 1, 0)
    rotations = compute.update_shared(1, 1.0)
    seen["rotations after step 1"] = [tuple(rotation.shape) for rotation in rotations]
    seen["moved"] = [stage.stream.version - version for stage, version in zip(stages, versions, strict=True)]
    seen["features"] = [stage.stream.fingerprint() for stage in stages]
    seen["shared"] = {kind: [each.tolist() for each in tensors] for kind, tensors in shared_of(compute).items()}
    seen["shared changed"] = [
        not torch.equal(*pair) for kind in before for pair in zip(before[kind], shared_of(compute)[kind], strict=True)
    ]
    seen["shared gradients"] = any(each.weight.grad is not None for stage in stages for each in (*stage.owned(), *stage.copies()))
    seen["tokens"] = rows * context
    return seen


def gradients_of(compute: Compute) -> dict[str, Tensor]:
    named = {name: each.grad for stage in compute.stages for name, each in stage.named_parameters()}
    return {name: gradient.clone() for name, gradient in named.items() if gradient is not None}


def counts(compute: Compute) -> list[int | None]:
    """Return the tokens counted at the boundary behind each stage."""
    return [None if each["boundary"] is None else each["boundary"]["tokens"] for each in compute.totals()]


def shared_of(compute: Compute) -> dict[str, list[Tensor]]:
    return {
        "owned": [each.weight.detach().clone() for stage in compute.stages for each in stage.owned()],
        "copies": [each.weight.detach().clone() for stage in compute.stages for each in stage.copies()],
    }


def check_compute(seen: Sequence[dict[str, Any]], stages: int, *, moves: bool, shares: bool) -> None:
    """Check what all processes of a replica have seen, first stage first."""
    *others, last = seen
    assert [index for each in seen for index in each["stages"]] == [*range(stages)]
    assert len({each["microbatch"] for each in seen}) == 1
    for name in ("evaluated first", "loss", "loss again"):  # known where the last stage is, and there alone
        assert isinstance(last[name], float) and math.isfinite(last[name]) and all(each[name] is None for each in others), name
    assert last["loss"] == pytest.approx(last["evaluated first"], rel=1e-9) and last["loss again"] == pytest.approx(last["loss"], rel=1e-9)
    assert not any(each["gradients after evaluation"] for each in seen) and all(each["gradients"] for each in seen)
    assert all(each["accumulates"] and each["weights stay"] for each in seen)
    tokens = [each["tokens"] for each in seen for _ in each["stages"]][:-1]
    for name, times in (("counted by evaluation", 0), ("counted once", 1), ("counted twice", 2)):
        assert [count for each in seen for count in each[name]] == [*(times * count for count in tokens), None], name
    for each in seen:
        assert len(each["links"]) == len(each["stages"])
        assert {"bytes_per_token", "compute_seconds", "encode_seconds", "decode_seconds", "wait_seconds"} <= each["figures"].keys()
        assert each["figures"]["bytes_per_token"] > 0 and all(math.isfinite(value) for value in each["figures"].values())
        assert len(each["in flight"]) == stages and min(each["in flight"]) >= 1
        assert each["bounded"] == [1] * stages == seen[0]["bounded"], "every stage has asked for one at most"
        assert each["rotations after step 0"] == 0 and not each["shared gradients"]
        assert len(each["rotations after step 1"]) == (len(each["stages"]) if moves else 0)
        assert each["moved"] == [int(moves)] * len(each["stages"])
        assert each["shared changed"] == [True] * len(each["shared changed"])
    assert len({features for each in seen for features in each["features"]}) == 1, "all stages know the same basis"
    owned, copies = ([weight for each in seen for weight in each["shared"][kind]] for kind in ("owned", "copies"))
    assert owned == copies and len(owned) == (stages - 1 if shares else 0)


# Group ----------------------------------------------------------------------------------------------------------------------------------


def check_group(groups: Sequence[Group], stages: int) -> None:
    """Check the groups of all processes, in the order of their numbers; with several stages each process has one."""
    count = len(groups)
    assert [group.number for group in groups] == [*range(count)]
    assert [group.replica for group in groups] == [number // stages for number in range(count)]
    assert {group.peers.count for group in groups} == {count // stages}
    said = [{"worker": number} for number in range(count)]
    assert together(groups, lambda group: group.gather({"worker": group.number}, WORD)) == [said] * count
    facts = together(groups, lambda group: group.announce({"worker": group.number} if group.number % stages == 0 else None, WORD))
    assert facts == [{"worker": 0}] * count
    for alike in (False, True):
        check_settle(groups, stages, alike)
    alone = together(groups, lambda group: group.settle(outcome_of(group, stages), meeting=False))
    for number, outcome in enumerate(alone):  # a replica that meets no other neither stops nor concerns itself with checkpoints
        first = number - number % stages
        assert (outcome.step, outcome.loss, outcome.stop, outcome.saved, outcome.stopper) == (7, loss_of(first, stages), False, (), -1)
        assert outcome.squared_norm == sum(norm_of(each) for each in range(first, first + stages))


def norm_of(number: int) -> float:
    return 2.0**number


def loss_of(first: int, stages: int) -> float:
    """Return what the last stage of the replica that begins with a process says."""
    return 1.0 + first // stages


def outcome_of(group: Group, stages: int) -> Outcome:
    """Say something of a step in which the last process wants to stop, and only step 4 is kept by all."""
    number, is_last = group.number, (group.number + 1) % stages == 0
    loss = loss_of(number - number % stages, stages) if is_last else None
    stop = group.number == group.peers.count * stages - 1
    return Outcome(7, loss, norm_of(number), stop, saved=(4, 100 + number), copied=(4,), stopper=number if stop else -1)


def check_settle(groups: Sequence[Group], stages: int, alike: bool) -> None:
    """Check that all return the same outcome, each replica with the norm of its own gradients unless these are alike."""
    count = len(groups)
    found = together(groups, lambda group: group.settle(outcome_of(group, stages), alike=alike))
    losses = [loss_of(first, stages) for first in range(0, count, stages)]
    for number, outcome in enumerate(found):
        assert isinstance(outcome, Outcome), outcome
        assert outcome.step == 7 and outcome.loss == sum(losses) / len(losses) and outcome.stop and outcome.stopper == count - 1
        assert outcome.saved == ((4,) if count > 1 else (4, 100)) and outcome.copied == (4,)
        first = 0 if alike else number - number % stages
        assert outcome.squared_norm == sum(norm_of(each) for each in range(first, first + stages)), number


def check_abandon(groups: Sequence[Group]) -> None:
    """Check that whoever waits gives up, everywhere, when one process abandons the step."""

    def wait_or_abandon(group: Group) -> None:
        if group.number == len(groups) - 1:
            group.abandon()
        group.gather(None)

    results = together(groups, wait_or_abandon)
    assert all(isinstance(each, (Abandoned, LinkError)) for each in results), results


# Backups, as the loop has them: through the keeper of checkpoints, where there are some and where there are none ------------------------


def check_backups(keepers: Sequence[Keeper], write: Callable[[Keeper, int], str], lose: Callable[[Keeper, str], None]) -> None:
    """Check the keepers of all processes; `write` writes a process's part of a step, `lose` takes it away. Both know its name."""
    kept = keepers[0].backups is not None
    names = [{write(keeper, step) for keeper in keepers} for step in (2, 4)]
    ((old,), (new,)) = names
    assert [keeper.held() for keeper in keepers] == [{} if not kept else {str(1 - number): []} for number in range(len(keepers))]
    for step, name in ((2, old), (4, new)):
        for keeper in keepers:
            keeper.begin(Position(step, 0.0), keeper.folder / "checkpoints" / name)  # which offers it
        for keeper in keepers:
            wait_until(lambda keeper=keeper, step=step: keeper.copied((step,)) == (step,))
    assert all(not keeper.speak(0.0).get("uncopied") for keeper in keepers)
    assert [keeper.held() for keeper in keepers] == [{str(1 - number): [old, new]} if kept else {} for number in range(len(keepers))]
    for keeper in keepers:
        keeper.confirm(4)
    assert [keeper.held() for keeper in keepers] == [{str(1 - number): [new]} if kept else {} for number in range(len(keepers))]
    assert all(each is None for each in together(keepers, lambda keeper: fetched(keepers, keeper, new))), "nothing is missing"
    lose(keepers[-1], new)
    results = together(keepers, lambda keeper: fetched(keepers, keeper, new))
    if kept:
        assert results == [None] * len(keepers)
        assert all(new in own_parts(keeper) for keeper in keepers)
    else:
        assert isinstance(results[-1], LinkError) and all(each is None for each in results[:-1])
        write(keepers[-1], 4)
    assert together(keepers, lambda keeper: keeper.copy_last(Position(4, 0.0))) == [None] * len(keepers)
    assert all(keeper.copied((4,)) == (4,) for keeper in keepers)


def own_parts(keeper: Keeper) -> list[str]:
    """Name the checkpoints of which a process has its own part."""
    (index,) = keeper.saver.indices
    return sorted(path.parent.name for path in keeper.folder.glob(f"checkpoints/*/stage-{index}.json"))


def fetched(keepers: Sequence[Keeper], keeper: Keeper, name: str) -> None:
    """Fetch a checkpoint by the votes of all."""
    votes = [{"steps": own_parts(each), "copies": each.held()} for each in keepers]
    barrier(keepers)
    keeper.fetch(name, own_parts(keeper), votes)


def barrier(keepers: Sequence[Keeper]) -> None:
    """Let nobody change a folder before all have voted."""
    gate = keepers[0].__dict__.setdefault("gate", threading.Barrier(len(keepers)))
    gate.wait(HANG)
