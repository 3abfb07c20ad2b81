"""Changes of samples: stored by sample, alike at both ends, bounded, and only of steps that count."""

from __future__ import annotations

import pytest
import torch

from helpers import TINY, make_pipeline, random_ids
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.delta import STORED
from thinwire.config.sections import TrainConfig
from thinwire.optim.optimizers import StageOptimizer, clip_scale

SAMPLE_MB = TINY.context * TINY.width * STORED.itemsize / 1e6


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return random_ids(batch=count, seed=seed)


def ends(pipeline) -> tuple:
    return pipeline.stages[0].exit, pipeline.stages[1].entry


def error(pipeline, ids: torch.Tensor, step: int, commit: bool = True) -> float:
    """Run a step; return how far what arrived was from what was sent, in the root mean square."""
    seen = {}
    exit, entry = ends(pipeline)
    hooks = [
        exit.register_forward_hook(lambda module, inputs, output: seen.setdefault("sent", []).append(inputs[0].detach())),
        entry.register_forward_hook(lambda module, inputs, output: seen.setdefault("got", []).append(output.detach())),
    ]
    pipeline.step(ids, step, 0)
    for hook in hooks:
        hook.remove()
    if commit:
        pipeline.update_shared(step, 1.0)
    return float((torch.cat(seen["sent"]) - torch.cat(seen["got"])).square().mean().sqrt())


def test_what_was_stored_belongs_to_the_sample_not_to_its_place_in_the_batch():
    pipeline = make_pipeline("delta", bits=3)
    ids = ids_of(4)
    first = error(pipeline, ids, 0)
    again = error(pipeline, ids.flip(0), 1)
    assert again < first / 3, "the weights have not moved, so the change is what 3 bits left over"
    assert error(pipeline, ids_of(4, seed=9), 2) > first / 2, "others are new"


def test_both_ends_store_the_same():
    pipeline = make_pipeline("delta", dtype="fp32")
    for step in range(3):
        error(pipeline, ids_of(4), step)
    stores = [end.statistics.state_dict() for end in ends(pipeline)]
    assert all(torch.equal(stores[0][name], stores[1][name]) for name in stores[0])
    assert int((stores[0]["tags_S"] >= 0).sum()) == 4 and ends(pipeline)[0].figures() == {"stored": 1.0}


def test_an_abandoned_step_and_a_validation_leave_nothing():
    pipeline = make_pipeline("delta")
    error(pipeline, ids_of(4), 0, commit=False)
    pipeline.evaluate(ids_of(4))
    error(pipeline, ids_of(4, seed=5), 1)
    tags = ends(pipeline)[0].statistics.tags_S
    assert int((tags >= 0).sum()) == 4, "the samples of the step that counts"


def test_memory_is_bounded_and_a_later_sample_takes_the_place():
    pipeline = make_pipeline("delta", memory_mb=1.5 * SAMPLE_MB)
    exit, _ = ends(pipeline)
    assert len(exit.statistics.tags_S) == 1
    error(pipeline, ids_of(1).repeat(2, 1), 0)
    tag = int(exit.statistics.tags_S)
    error(pipeline, ids_of(1, seed=4).repeat(2, 1), 1)
    assert int(exit.statistics.tags_S) != tag
    with pytest.raises(ValueError, match=r"codec.memory_mb is .*; one sample takes"):
        make_codec(codec_defaults("delta", memory_mb=SAMPLE_MB / 2), TINY)


def test_the_state_goes_on_after_a_restart():
    first, second = (make_pipeline("delta") for _ in range(2))
    error(first, ids_of(4), 0)
    for one, other in zip(ends(first), ends(second), strict=True):
        other.load_state_dict(one.state_dict())
    assert error(second, ids_of(4), 1) == error(first, ids_of(4), 1)


@pytest.mark.full
def test_on_samples_that_return_it_learns_better_than_plain_rounding():
    """32 samples over and over, 2 bits: what arrives comes near to what was sent."""
    losses = {}
    for codec in ("quantize", "delta"):
        pipeline = make_pipeline(codec, bits=2, backward_bits=8)
        optimizers = [StageOptimizer(stage, TrainConfig(rate=0.003)) for stage in pipeline.stages]
        for step in range(160):
            ids = ids_of(32)[(step % 8) * 4 : (step % 8) * 4 + 4]
            loss = pipeline.step(ids, step, 0)
            norm = sum(each.squared_norm() for each in optimizers) ** 0.5
            for each in optimizers:
                each.step(1.0, clip_scale(norm, 1.0))
            pipeline.update_shared(step, 1.0)
            losses.setdefault(codec, []).append(loss)
    assert sum(losses["delta"][-16:]) < sum(losses["quantize"][-16:])
