"""What both ends of a boundary know of the codes that cross it in one direction, and learn alike.

A value is sent as the number of steps between it and what both ends predict for its token and channel:

    sender      y = x U,   q = round((y - expected[t]) / step)          integers, `bits/entropy.py` puts them into bytes
    receiver    x = (expected[t] + q step) U^T

`prediction.py` says what is expected, U is the rotation to the principal axes of q, step a number on a ladder that the sender chooses and
every payload carries. Predicting inside the quantiser, and not only in the coder, makes the zero of the dead zone mean `as usual`.
Everything is learnt from codes alone, in integers, and only when a step is committed: sums over a step's microbatches do not depend on
their order, an abandoned step leaves nothing behind, and both ends hold the same numbers without a word about them.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.bits import entropy
from thinwire.bits.entropy import LIMIT, UNIT, Ints, Tables
from thinwire.bits.ladder import LOWEST, OCTAVE, step_ratio, step_size
from thinwire.codecs.aim import Aim
from thinwire.codecs.mean_table import LIMIT as MEAN_LIMIT
from thinwire.codecs.mean_table import MeanTable
from thinwire.codecs.prediction import Prediction
from thinwire.codecs.rotation import add, ordered_product, principal
from thinwire.model.ends import Context
from thinwire.model.host import HostBuffers

CODES = torch.float32
"""Format of codes in the graph: it holds them, and UNIT times them, exactly."""
NOT_FINITE = LIMIT
"""The code of a value that is not finite."""
UNSET = LOWEST - 1
FINE = 2**16
"""Usual sizes are kept in 1/FINE of the reference step."""
WIDEST = 128
"""Most channels that are rotated: the work grows with their cube."""
ROTATE_EVERY = 32
"""Steps between rotations, after those of steps 1, 2, 4, 8, ..."""
TURN = 2**30
"""One, in the elements of the rotation."""
FARTHEST = 12 * OCTAVE
"""Largest ratio of steps that anything is carried over."""
DRIFT = 4 * OCTAVE
"""How far the step moves until the reference step follows."""
MESSAGE_BITS = 64
"""What a payload takes besides its codes, nearly."""
STEEPNESS = 4
"""The bits of a code that is r steps are taken to be log2(1 + STEEPNESS r^2) / 2 where a slope is needed."""


@dataclass(frozen=True)
class Coding:
    """What packing needs of a model: made once after each step."""

    sizes: Ints
    unit: int | None
    """What step the sizes count; None: nothing was learnt, and they count whichever is in use."""
    tables: Tables
    check: int
    """Part of a hash of all that was learnt."""

    def at(self, number: int) -> Ints:
        """Return the usual sizes of codes in steps of another size, in 1/UNIT."""
        sizes = self.sizes if self.unit is None else carried(self.sizes, self.unit - number)
        return np.maximum(sizes // (FINE // UNIT), 1)


@dataclass
class Seen:
    """The codes of a step under way."""

    step: int = -1
    number: int = UNSET
    ids: list[Tensor] = field(default_factory=list)
    codes: list[Tensor] = field(default_factory=list)


def finite(values: Tensor) -> Tensor:
    """Return the values that are numbers."""
    return values[values.isfinite()]


def carried(values: Ints, difference: int) -> Ints:
    """Return integers times 2^(difference/32), rounded."""
    factor, shift = step_ratio(min(max(difference, -FARTHEST), FARTHEST))
    return (values * factor + (1 << (shift - 1))) >> shift


class CodeModel(HostBuffers):
    """Quantise, dequantise and learn at one end."""

    on_host = ("number", "unit", "age", "tokens", "sizes_K", "moments_KK", "rotation_KK", "tables")
    number: Tensor
    unit: Tensor
    age: Tensor
    tokens: Tensor
    sizes_K: Tensor
    moments_KK: Tensor
    rotation_KK: Tensor
    tables: Tensor
    weight: Tensor | None

    def __init__(self, width: int, vocabulary: int, aim: Aim, dead_zone: float, compute: torch.dtype) -> None:
        """Begin with nothing learnt; without a vocabulary nothing is predicted."""
        super().__init__()
        self.width, self.aim, self.dead_zone, self.compute = width, aim, dead_zone, compute
        self.prediction = Prediction(width, vocabulary) if vocabulary else None
        self.rotates = 1 < width <= WIDEST
        # The step in use, and the one that means and usual sizes count.
        self.register_buffer("number", torch.tensor(UNSET))
        self.register_buffer("unit", torch.tensor(0))
        # Steps learnt from, and tokens in the last of them.
        self.register_buffer("age", torch.tensor(0))
        self.register_buffer("tokens", torch.tensor(0))
        self.register_buffer("sizes_K", torch.full((width,), FINE))
        turned = width if self.rotates else 0
        self.register_buffer("moments_KK", torch.zeros(turned, turned, dtype=torch.int64))
        self.register_buffer("rotation_KK", torch.eye(turned, dtype=torch.int32) * TURN)
        self.register_buffer("tables", torch.from_numpy(entropy.prior_counts().copy()))
        # What the bits count in the loss beside `rate_penalty`, in 1/OCTAVE of a doubling, where that is steered.
        self.register_buffer("weight", torch.tensor(0) if aim.settled is not None else None)
        self.seen, self.rate = Seen(), math.nan
        self._coding: Coding | None = None
        self.register_load_state_dict_post_hook(lambda module, keys: module.forget())

    def forget(self) -> None:
        """Drop what was made from the state: it has changed."""
        self._coding, self.seen = None, Seen()

    def coding(self) -> Coding:
        """Return what packing needs."""
        if self._coding is None:
            check = 0
            for name, buffer in self.named_buffers():
                if name not in ("number", "weight") and buffer.numel():  # the sender's choice: in every payload, and its own affair
                    check = zlib.crc32(buffer.contiguous().view(-1).view(torch.uint8).numpy().data, check)
            sizes, counts = self.sizes_K.numpy(), self.tables.numpy()
            self._coding = Coding(sizes, int(self.unit) if int(self.age) else None, Tables.of(counts), check & 0xFF)
        return self._coding

    def in_steps(self, values_BTK: Tensor, ids_BT: Tensor, context: Context) -> tuple[int, Tensor]:
        """Return the step's number, and how many steps values are from what is expected, along the principal axes."""
        turned = self.turned(values_BTK.detach().to(self.compute), back=False)
        number = int(self.number)
        if number == UNSET:
            number = self.aim.first(float(finite(turned.cpu()).double().square().mean().sqrt().nan_to_num(0.0)))
            if context.training:
                self.number.fill_(number)
        steps = turned / step_size(number)
        if self.prediction is not None:
            steps -= self._expected(ids_BT, number).to(steps.dtype) / UNIT
        return number, steps

    def quantize(self, number: int, steps: Tensor, ids_BT: Tensor, context: Context, noise: Tensor | None = None) -> Tensor:
        """Return the step's number and the codes in one row; with noise in [0, 1) round stochastically, else with a dead zone."""
        codes = (steps.abs() + (1 - self.dead_zone)).floor().copysign(steps) if noise is None else (steps + noise).floor()
        codes = codes.clamp(1 - LIMIT, LIMIT - 1).where(steps.isfinite(), NOT_FINITE).to(CODES)
        self._see(codes, ids_BT, number, context)
        return torch.cat((codes.new_tensor([number]), codes.flatten() + 0.0))

    def dequantize(self, row: Tensor, ids_BT: Tensor, context: Context, noise: Tensor | None = None) -> Tensor:
        """Return the values that a row from `quantize` stands for; noise that both ends know is taken away again."""
        number, codes = int(row[0]), row[1:].detach().view(*ids_BT.shape, self.width)
        fine = (codes.to(self.compute) if noise is None else codes.to(self.compute) + (0.5 - noise)) * UNIT
        if self.prediction is not None:
            fine += self._expected(ids_BT, number).to(self.compute)
        values = (fine * (step_size(number) / UNIT)).masked_fill(codes == NOT_FINITE, torch.nan)
        self._see(codes, ids_BT, number, context)
        return self.turned(values, back=True)

    def slope(self, number: int, steps: Tensor) -> Tensor:
        """Return the derivative of the bits per token of a training step with respect to the values sent, once a step is known."""
        tokens, square = int(self.tokens), steps.square()
        if not tokens:
            return torch.zeros_like(steps)
        along = STEEPNESS * steps / (1 + STEEPNESS * square) / (math.log(2) * step_size(number) * tokens)
        return self.turned(along.nan_to_num(0.0), back=True)

    def turned(self, values: Tensor, *, back: bool) -> Tensor:
        """Go over to the principal axes, or back."""
        if not self.rotates or not int(self.age):
            return values
        rotation_KK = (self.rotation_KK.to(torch.float64) / TURN).to(values.dtype).to(values.device)
        with torch.autocast(values.device.type, enabled=False):
            return values @ (rotation_KK.T if back else rotation_KK)

    def _expected(self, ids: Tensor, number: int) -> Tensor:
        """Return what is expected, in 1/UNIT of a step."""
        assert self.prediction is not None
        factor, shift = step_ratio(min(max(int(self.unit) - number, -FARTHEST), FARTHEST))
        return ((self.prediction.expected(ids) * factor + (1 << (shift - 1))) >> shift).clamp_(-(2**22), 2**22)

    def _see(self, codes: Tensor, ids_BT: Tensor, number: int, context: Context) -> None:
        """Keep a training microbatch's codes until the step is committed."""
        if not context.training:
            return
        if context.step != self.seen.step:
            self.seen = Seen(context.step, number)
        if self.prediction is not None:
            self.seen.ids.append(ids_BT.flatten())
        self.seen.codes.append(codes.to(torch.int16).flatten(0, 1))

    def commit(self) -> None:
        """Learn from the codes of a step, of which both ends have the same."""
        seen, self.seen = self.seen, Seen()
        if not seen.codes:
            return
        codes, number = torch.cat(seen.codes).cpu().long(), seen.number
        codes = codes.masked_fill(codes == NOT_FINITE, 0)
        codes_NK, coding = codes.numpy(), self.coding()
        found = entropy.count_symbols(codes_NK, coding.at(number))
        self.rate = (float((found * coding.tables.lengths()).sum()) + MESSAGE_BITS * len(seen.codes)) / codes_NK.size
        self._follow(number)
        fine = codes * UNIT
        if self.prediction is not None:
            ids = torch.cat(seen.ids).cpu()
            fine += self._expected(ids, number)
            self.prediction.learn(ids, torch.from_numpy(carried(fine.numpy(), number - int(self.unit))))
        self._learn_sizes(codes_NK, number)
        self.tables.copy_(torch.from_numpy(entropy.learn_counts(self.tables.numpy(), found)))
        self.age += 1
        self.tokens.fill_(len(codes_NK))
        if self.rotates:
            self._learn_rotation(codes_NK)
        spread = math.sqrt(float(fine.double().square().mean())) / UNIT
        self.number.fill_(self.aim.next(number, self.rate, spread, int(self.age)))
        if self.weight is not None:
            self.weight.fill_(self.aim.next_weight(int(self.weight), self.rate, int(self.age)))
        self._coding = None

    def _means(self) -> tuple[MeanTable, ...]:
        return () if self.prediction is None else self.prediction.tables()

    def _follow(self, number: int) -> None:
        """Let the reference step follow one that has moved away."""
        unit = int(self.unit)
        if int(self.age) and abs(number - unit) <= DRIFT:
            return
        for buffer in (self.sizes_K, *(table.means_RK for table in self._means())) if int(self.age) else ():
            moved = carried(buffer.numpy().astype(np.int64), unit - number)
            buffer.copy_(torch.from_numpy(moved.clip(-MEAN_LIMIT, MEAN_LIMIT)))
        self.unit.fill_(number)

    def _learn_sizes(self, codes_NK: Ints, number: int) -> None:
        """Move the usual size of each channel's codes a quarter of the way to that of this step."""
        found = carried(np.abs(codes_NK).sum(0) * FINE // len(codes_NK), number - int(self.unit))
        before = self.sizes_K.numpy() if int(self.age) else found
        self.sizes_K.copy_(torch.from_numpy(np.maximum((3 * before + found) // 4, 1)))

    def _learn_rotation(self, codes_NK: Ints) -> None:
        """Add to the second moments of the codes and, now and then, turn to their principal axes."""
        bounded = codes_NK.clip(-1023, 1023).astype(np.float64)  # so that all sums are exact, whatever their order
        self.moments_KK += torch.from_numpy((bounded.T @ bounded).astype(np.int64))
        age = int(self.age)
        if age & (age - 1) and age % ROTATE_EVERY:
            return
        variances, axes = principal(self.moments_KK.numpy().astype(np.float64))
        self.moments_KK.zero_()
        turned = np.rint(ordered_product(self.rotation_KK.numpy() / TURN, axes) * TURN).clip(-TURN, TURN)
        self.rotation_KK.copy_(torch.from_numpy(turned.astype(np.int32)))
        for table in self._means():
            table.turn(torch.from_numpy(axes))
        # Of each new axis expect the size that its variance tells, as much in all as before; the next steps put it right.
        share = np.sqrt(variances / max(add(variances), 1.0))
        scaled = np.rint(share * (int(self.sizes_K.sum()) / max(add(share), 1e-9)))
        self.sizes_K.copy_(torch.from_numpy(np.maximum(scaled, 1).astype(np.int64)))
