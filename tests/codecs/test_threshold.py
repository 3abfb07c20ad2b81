"""The stale threshold: what it keeps, when it is renewed, that nothing but a new training step changes it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from helpers import TINY, gradients, make_pipeline, random_ids
from thinwire.bits.mask import AS_POSITIONS, BITMAP
from thinwire.codecs.base import Codec
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.threshold import ThresholdExit
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context

BATCH, TIME = 4, 8
NEVER = math.inf
"""A slack that is never exceeded."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(width: int = 32, **options) -> Codec:
    model = replace(TINY, width=width, heads=1, kv_heads=1)
    return make_codec(codec_defaults("threshold", **{"dtype": "fp32"} | options), model)


def make_exit(**options) -> ThresholdExit:
    return build(**options).ends(StagePlan(0, 2, range(2)))[1]


def send(exit: ThresholdExit, source: torch.Tensor, step: int, first: int = 0, training: bool = True) -> tuple[torch.Tensor, ...]:
    return exit(source, torch.zeros(source.shape[:2]), Context(step, torch.arange(first, first + len(source)), training))


def state(exit: ThresholdExit) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in exit.state_dict().items()}


def densities(scales: list[float], **options) -> list[float]:
    """Return the density of each step of a stream whose scale is given."""
    exit, found = make_exit(**options), []
    for step, scale in enumerate(scales):
        send(exit, normal(BATCH, TIME, 32, seed=step) * scale, step)
        found.append(exit.figures()["density"])
    return found


def test_lifespan_of_one_step_is_topk_over_the_microbatch():
    exit = make_exit(lifespan=1)
    for step in range(10):
        source = normal(BATCH, TIME, 32, seed=step) * (1 + step)
        values, mask = send(exit, source, step)
        kept = round(0.05 * source.numel())
        positions = source.flatten().abs().topk(kept).indices.sort().values
        assert torch.equal(mask.flatten().nonzero()[:, 0], positions)
        assert torch.equal(values[:kept], source.flatten()[positions]) and not values[kept:].any()


def test_gradient_is_the_dense_one_times_the_mask():
    codec = build()
    exit, entry = codec.ends(StagePlan(0, 2, range(2)))[1], codec.ends(StagePlan(1, 2, range(2, 4)))[0]
    source = normal(BATCH, TIME, 32).requires_grad_()
    sent = send(exit, source, 0)
    received = entry(sent, torch.zeros(BATCH, TIME), Context(0, torch.arange(BATCH)))
    dense = received.detach().requires_grad_()
    for stream in (received, dense):
        (stream @ normal(32, 8, seed=1)).tanh().sum().backward()
    assert torch.equal(received, source.detach() * sent[1])
    assert torch.equal(source.grad, dense.grad * sent[1])
    assert codec.pack(1, torch.zeros_like(sent[1]), "backward") == b""
    assert codec.spec(BATCH, TIME).tensors[1].backward_bytes == 0


@pytest.mark.parametrize("shape", [(1, 2, 8), (2, 3, 20), (4, 8, 32), (2, 16, 128)])
@pytest.mark.parametrize("density", [0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("dtype, size", [("fp32", 4), ("bf16", 2)])
def test_bytes_are_those_of_the_kept_values_and_of_the_shorter_mask(shape, density, dtype, size):
    codec = build(shape[-1], density=density, dtype=dtype)
    source = normal(*shape)
    values, mask = send(codec.ends(StagePlan(0, 2, range(2)))[1], source, 0)
    count, kept = source.numel(), max(1, round(density * source.numel()))
    rows, width = count // shape[-1], shape[-1]
    bitmap = math.ceil(count / 8)
    positions = math.ceil(rows * math.ceil(math.log2(width + 1)) / 8) + math.ceil(kept * math.ceil(math.log2(width)) / 8)
    packed = codec.pack(1, mask, "forward")
    assert len(codec.pack(0, values, "forward")) == len(codec.pack(0, values, "backward")) == kept * size
    assert len(packed) == 1 + min(bitmap, positions)
    assert packed[:1] == (AS_POSITIONS if positions < bitmap else BITMAP)
    for slot, (tensor, spec) in enumerate(zip((values, mask), codec.spec(*shape[:2]).tensors, strict=True)):
        assert torch.equal(codec.unpack(slot, codec.pack(slot, tensor, "forward"), spec, "forward"), tensor)


def test_values_that_end_in_zero_survive():
    codec = build()
    spec = codec.spec(1, 2).tensors[0]
    for front in ([], [0.0, 1.0], [2.0, 0.0, -0.0], [1.0, 256.0, 0.0]):
        values = torch.tensor(front + [0.0] * (64 - len(front)))
        data = codec.pack(0, values, "backward")
        assert len(data) == 4 * sum(values.flip(0).view(torch.int32).ne(0).cumsum(0) > 0)
        assert torch.equal(codec.unpack(0, data, spec, "backward").view(torch.int32), values.view(torch.int32))


def test_layout_of_positions():
    """Two tokens of 200 values: how many each keeps, then where, all in bytes."""
    codec = build(200)
    mask = codec.unpack(1, bytes([1, 1, 2, 199, 3, 5]), codec.spec(1, 2).tensors[1], "forward")
    assert mask.nonzero()[:, 1:].tolist() == [[0, 199], [1, 3], [1, 5]]
    assert codec.pack(1, mask, "forward") == bytes([1, 1, 2, 199, 3, 5])


@pytest.mark.parametrize(
    "data",
    [
        [],
        [2, 1, 2],
        [1, 1],
        [1, 1, 2, 199, 3],
        [1, 1, 2, 199, 3, 5, 0],
        [1, 1, 2, 199, 5, 3],
        [1, 0, 2, 5, 5],
        [1, 1, 0, 200],
        [0, *[0] * 49],
    ],
    ids=["empty", "tag", "numbers missing", "position missing", "one too many", "falling", "twice", "too large", "short bitmap"],
)
def test_damaged_mask_is_refused(data):
    codec = build(200)
    with pytest.raises(ValueError, match="bytes where"):
        codec.unpack(1, bytes(data), codec.spec(1, 2).tensors[1], "forward")


def test_threshold_is_kept_for_longer_and_longer_up_to_its_lifespan():
    exit, renewed = make_exit(lifespan=6, slack=NEVER), []
    for step in range(100, 130):  # after a warm-up, say
        send(exit, normal(BATCH, TIME, 32, seed=step), step)
        renewed.append(int(exit.renewed))
    assert sorted(set(renewed)) == [100, 101, 103, 107, 113, 119, 125]


def test_density_stays_near_the_target_while_the_stream_grows_tenfold():
    scales = [10 ** (max(0, step - 130) / 40) for step in range(171)]
    stale, fresh = densities(scales, slack=NEVER)[131:], densities(scales)[131:]
    assert max(stale) > 0.5 and sum(stale) / len(stale) > 0.25
    assert max(fresh) < 0.05 * 1.5 * 1.5 and sum(fresh) / len(fresh) == pytest.approx(0.05, rel=0.3)


@pytest.mark.parametrize("factor", [10, 0.1])
def test_a_leap_of_the_scale_is_made_good_in_the_next_step(factor):
    scales = [1.0] * 131 + [float(factor)] * 20
    stale, fresh = densities(scales, slack=NEVER), densities(scales)
    assert all(density > 0.5 or density < 0.01 for density in stale[131:])
    assert fresh[131] == stale[131]
    assert all(0.05 / 1.6 < density < 0.05 * 1.6 for density in fresh[132:])


def test_all_microbatches_of_a_step_share_the_threshold_of_the_first():
    exit = make_exit(lifespan=1)
    first, second = normal(2, TIME, 32), normal(2, TIME, 32, seed=1) * 3
    kept = [send(exit, source, 0, 2 * index)[1].count_nonzero() for index, source in enumerate((first, second))]
    assert int(kept[0]) == round(0.05 * first.numel()) < int(kept[1]) / 3
    assert int(kept[1]) == int((second.abs() >= exit.tau).sum())
    assert exit.figures() == {"density": pytest.approx(float(sum(kept)) / (2 * first.numel()))}


def test_computing_a_microbatch_again_gives_the_same_and_changes_nothing():
    exit = make_exit()
    for step in range(3):
        microbatches = [normal(2, TIME, 32, seed=step + 7 * index) * (1 + index) for index in range(3)]
        found = [send(exit, source, step, 2 * index) for index, source in enumerate(microbatches)]
        before = state(exit)
        for index in (2, 0, 1, 1):
            again = send(exit, microbatches[index], step, 2 * index)
            assert all(torch.equal(*pair) for pair in zip(again, found[index], strict=True))
        assert state(exit) == before


def test_evaluation_uses_the_threshold_and_does_not_change_it():
    exit, source = make_exit(), normal(BATCH, TIME, 32)
    fresh = state(exit)
    _, mask = send(exit, source, 0, training=False)
    assert mask.count_nonzero() == round(0.05 * source.numel()) and state(exit) == fresh and exit.figures() == {}
    send(exit, source, 0)
    before = state(exit)
    _, mask = send(exit, source * 3, 500, training=False)
    assert state(exit) == before
    assert torch.equal(mask.bool(), (source * 3).abs() >= exit.tau)


def test_a_restored_exit_goes_on_as_if_nothing_had_happened():
    straight, restored = make_exit(lifespan=4), make_exit(lifespan=4)
    for step in range(12):
        if step == 6:
            restored.load_state_dict({name: tensor.clone() for name, tensor in straight.state_dict().items()})
        source = normal(BATCH, TIME, 32, seed=step) * (1 + step)
        sent = send(straight, source, step, BATCH * step)
        if step >= 6:
            assert all(torch.equal(*pair) for pair in zip(sent, send(restored, source, step, BATCH * step), strict=True))
            assert state(straight) == state(restored)


def test_a_value_that_is_not_finite_is_sent_and_forgotten():
    exit = make_exit()
    for step in range(60):
        send(exit, normal(BATCH, TIME, 32, seed=step), step)
    broken = normal(BATCH, TIME, 32)
    broken[1] = math.nan
    values, mask = send(exit, broken, 60)
    assert mask[1].all() and int(values.isnan().sum()) == TIME * 32
    for step in (61, 62):
        send(exit, normal(BATCH, TIME, 32, seed=step), step)
    assert exit.tau.isfinite() and 0.03 < exit.figures()["density"] < 0.08


@pytest.mark.parametrize("options", [{}, {"warmup": 1}], ids=str)
def test_every_weight_in_front_of_the_boundary_learns(options):
    pipeline = make_pipeline("threshold", **options)
    for step in range(2):
        pipeline.step(random_ids(), step, 4 * step)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients(pipeline).values())
    (exit,) = [module for module in pipeline.stages[0].modules() if isinstance(module, ThresholdExit)]
    assert exit.tau.dtype == torch.float64 and exit.step == 1 and 0.02 < exit.figures()["density"] < 0.15


@pytest.mark.parametrize(
    "options, message",
    [
        ({"density": 0.0}, r"codec.density is 0.0; choose a share"),
        ({"lifespan": 0}, r"codec.lifespan is 0; choose 1 step or more"),
        ({"slack": 1.0}, r"codec.slack is 1.0; choose a factor above 1"),
        ({"bits": 4}, r"codec.bits is 4, but `threshold`.* choose the codec `topk`"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
