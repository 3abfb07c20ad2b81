"""One entropy-coded boundary and what crosses it, for tests."""

from __future__ import annotations

import torch

from helpers import TINY
from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.codecs.entropy import Statistics
from thinwire.model.cut import StagePlan
from thinwire.model.ends import Context, Learning

BATCH, TIME, WIDTH = 4, 12, TINY.width


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Line:
    """One boundary, its two ends, and microbatches that cross it."""

    def __init__(self, **options) -> None:
        self.codec = make_codec(codec_defaults("dense", **{"entropy": True} | options), TINY, seed=5)
        self.exit, self.entry = (
            self.codec.ends(plan)[side] for plan, side in ((StagePlan(0, 2, range(2)), 1), (StagePlan(1, 2, range(2, 4)), 0))
        )
        self.sender, self.receiver = self.codec.with_end(self.exit), self.codec.with_end(self.entry)
        self.spec = self.codec.spec(BATCH, TIME).tensors[0]

    @property
    def ends(self) -> tuple[Statistics, Statistics]:
        return self.exit.second.statistics, self.entry.second.statistics

    def cross(self, source, gradient, ids, step: int, training: bool = True) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Send a microbatch and its gradient; return what arrives, and the bytes of both."""
        context = Context(step, torch.arange(BATCH), training)
        stream = source.clone().requires_grad_()
        (row,) = self.exit(stream, ids, context)
        forward = self.sender.pack(0, row, "forward")
        arrived = self.receiver.unpack(0, forward, self.spec, "forward").requires_grad_()
        output = self.entry((arrived,), ids, context)
        output.backward(gradient)
        backward = self.receiver.pack(0, arrived.grad, "backward")
        row.backward(self.sender.unpack(0, backward, self.spec, "backward"))
        return output.detach(), stream.grad, len(forward), len(backward)

    def commit(self) -> None:
        for end in (self.exit, self.entry):
            for module in end.modules():
                if isinstance(module, Learning):
                    module.commit()

    def train(self, steps: int, stream=None, microbatches: int = 2) -> list[tuple[float, float]]:
        """Cross so many steps; return the bits per value of each, forward and backward."""
        rates = []
        for step in range(steps):
            sizes = [self.cross(*(stream or gaussian)(step, number), step)[2:] for number in range(microbatches)]
            self.commit()
            rates.append(tuple(8 * sum(each) / (microbatches * BATCH * TIME * WIDTH) for each in zip(*sizes, strict=True)))
        return rates

    def states(self) -> tuple[dict, dict]:
        return tuple({name: tensor.clone() for name, tensor in end.state_dict().items()} for end in self.ends)


def gaussian(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a stream, its gradient and ids: correlated channels, a mean for each token."""
    seed = 1000 * step + number
    ids = torch.randint(0, 20, (BATCH, TIME), generator=torch.Generator().manual_seed(seed))
    mix = normal(WIDTH, WIDTH, seed=1) / WIDTH**0.5
    means = normal(TINY.vocabulary, WIDTH, seed=2)
    return 3 * means[ids] + normal(BATCH, TIME, WIDTH, seed=seed) @ mix, 1e-6 * normal(BATCH, TIME, WIDTH, seed=seed + 500), ids
