"""powersgd: a gradient matrix travels as two thin factors (Vogels, Karimireddy, Jaggi 2019, arXiv 1905.13727).

With M = gradient + residual on each replica: P = mean(M Q), made orthonormal; Q = mean(M^T P); all go on with P Q^T, keep M - P Q^T as
residual, and start the next step from Q, which makes the steps a power iteration. r (m + n) numbers travel instead of m n; vectors, and
matrices for which that is no gain, travel whole. What is computed from P and Q on every replica is rounded the same way on any
processor: the replicas must not drift apart because their machines differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.config.sections import RunConfig
from thinwire.model.noise import key, uniform
from thinwire.model.subspace.drift import carry_over
from thinwire.replicas.allreduce import mean, refuse_gaps
from thinwire.replicas.exchange import Exchange, ExchangeOptions, Named, refuse_warmup
from thinwire.replicas.hybrid import relative_norm
from thinwire.replicas.peers import Peers

ROWS_VALUES = 2**17
"""Values that `outer_sum` works on at a time: few enough to stay in a cache."""

LEAST_SHARE = 1e-12
"""A column of which no more is left by those before it is rounding alone."""


@dataclass(frozen=True, kw_only=True)
class PowerSGDOptions(ExchangeOptions):
    """How thin the factors are."""

    rank: int = 4
    """Columns of each factor, r."""
    warmup: int = 0
    """First steps in which gradients travel whole: they turn faster there than a power iteration follows."""

    def check(self, config: RunConfig) -> None:
        refuse_warmup(self.warmup)
        width = config.model.width
        if not 1 <= self.rank < width:
            raise ValueError(
                f"exchange.rank is {self.rank}; no matrix of width {width} becomes smaller unless it is 1 to {width - 1}; "
                "choose one such as 4"
            )


class PowerSGD(Exchange):
    """Average gradient matrices by their factors, and give what these miss to the next step."""

    Options = PowerSGDOptions
    options: PowerSGDOptions

    def __init__(self, options: PowerSGDOptions, config: RunConfig, peers: Peers, parameters: Named) -> None:
        super().__init__(options, config, peers, parameters)
        self.forms = {name: form for name, parameter in parameters.items() if (form := factored_form(parameter, options.rank))}
        """Rows, columns and rank of each parameter that travels as factors."""

    @torch.no_grad()
    def gradients(self, named: Named, step: int) -> None:
        if step == 0:
            self._begin()
        thin = [name for name in named if name in self.forms and step >= self.options.warmup]
        whole = [name for name in named if name not in thin]
        matrices = [self._matrix(name, named[name]) for name in thin]
        left = [matrix @ self._start(name, matrix, step) for name, matrix in zip(thin, matrices, strict=True)]
        means = mean(self.peers, [*(named[name] for name in whole), *left])
        for name, average in zip(whole, means, strict=False):
            named[name].copy_(average)
        if not thin:
            return
        left = [gram_schmidt(factor) for factor in means[len(whole) :]]
        right = mean(self.peers, [matrix.T @ factor for matrix, factor in zip(matrices, left, strict=True)])
        residuals = []
        for name, matrix, left_MR, right_NR in zip(thin, matrices, left, right, strict=True):
            found = outer_sum(left_MR, right_NR)
            named[name].copy_(found.view(named[name].shape))
            residuals.append(matrix - found)
            self.propose(f"factor/{name}", right_NR)
            self.propose(f"residual/{name}", residuals[-1].view(named[name].shape))
        self.figures = {"residual": relative_norm(residuals, matrices)}

    def _begin(self) -> None:
        """Begin with nothing left over, and with no directions."""
        for name, (_, columns, rank) in self.forms.items():
            parameter = self.parameters_of_stage[name].detach()
            self.propose(f"factor/{name}", parameter.new_zeros(columns, rank))
            self.propose(f"residual/{name}", torch.zeros_like(parameter))

    def _matrix(self, name: str, gradient: Tensor) -> Tensor:
        rows, columns, _ = self.forms[name]
        return (gradient + self.state.get(f"residual/{name}", 0)).reshape(rows, columns)

    def _start(self, name: str, matrix: Tensor, step: int) -> Tensor:
        """Return orthonormal columns to begin with: the last factor's, or random ones, the same on all replicas, where it has none."""
        _, columns, rank = self.forms[name]
        keys = torch.tensor([key(self.config.seed, step, *name.encode())])
        last_NR = self.state.get(f"factor/{name}", matrix.new_zeros(columns, rank))
        # A gradient that was once zero leaves columns of zeros, from which no power iteration ever gets away.
        drawn_NR = uniform(keys, (1, columns * rank)).view(columns, rank).to(last_NR) - 0.5
        return gram_schmidt(torch.where((last_NR == 0).all(0), drawn_NR, last_NR))

    def talks_before(self, step: int) -> bool:
        return True

    def load_state(self, state: Named) -> None:
        needed: dict[str, tuple[int, ...]] = {}
        for name, (_, columns, rank) in self.forms.items():
            needed |= {f"factor/{name}": (columns, rank), f"residual/{name}": tuple(self.parameters_of_stage[name].shape)}
        refuse_gaps("powersgd", state, needed)
        super().load_state({name: state[name] for name in needed})

    def carry_over(self, rotation_KK: Tensor, axes: Mapping[str, int]) -> None:
        super().carry_over(rotation_KK, axes)
        for name, axis in axes.items():
            if axis == 1 and f"factor/{name}" in self.state:  # the factor has the columns of the matrix as its rows
                carry_over(self.state[f"factor/{name}"], rotation_KK, 0)


def factored_form(parameter: Tensor, rank: int) -> tuple[int, int, int] | None:
    """Return rows, columns and rank of a parameter, or None where factors would be no smaller than the parameter itself."""
    if parameter.dim() < 2:
        return None
    rows = len(parameter)
    columns = parameter.numel() // max(rows, 1)
    rank = min(rows, columns, rank)
    return (rows, columns, rank) if rank * (rows + columns) < rows * columns else None


def gram_schmidt(matrix_NR: Tensor) -> Tensor:
    """Make columns orthonormal by Gram-Schmidt, twice to be exact; one that those before it span becomes zero."""
    # On the host, for not every device has fp64, and the columns are few.
    columns_RN = matrix_NR.cpu().T.to(torch.float64, memory_format=torch.contiguous_format, copy=True)
    for _ in range(2):
        sizes = added(columns_RN.square()).sqrt()
        for place, column in enumerate(columns_RN):
            norm = added(column.square()).sqrt()
            column /= norm.masked_fill(norm <= LEAST_SHARE * sizes[place], torch.inf)  # nan is no less than anything, and stays
            rest = columns_RN[place + 1 :]
            rest -= added(column * rest) * column
    return columns_RN.T.to(matrix_NR.dtype, memory_format=torch.contiguous_format).to(matrix_NR.device)


def added(rows: Tensor) -> Tensor:
    """Add up each row, its second half to its first until one value is left: an order that no processor changes, unlike that of `sum`."""
    count = rows.shape[-1]
    rows = functional.pad(rows, (0, 2 ** (count - 1).bit_length() - count))
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        rows = rows[..., :half] + rows[..., half:]
    return rows


def outer_sum(left_MR: Tensor, right_NR: Tensor) -> Tensor:
    """Return P Q^T as a sum of outer products in their order: a matrix product would add them up as suits the processor."""
    found = torch.empty(len(left_MR), len(right_NR), dtype=left_MR.dtype, device=left_MR.device)
    right = right_NR.T.contiguous()
    height = max(1, ROWS_VALUES // len(right_NR))
    space = found.new_empty(height, len(right_NR))
    for start in range(0, len(found), height):
        part, rows = found[start : start + height], left_MR[start : start + height]
        torch.mul(rows[:, :1], right[0], out=part)
        for place in range(1, len(right)):
            part += torch.mul(rows[:, place : place + 1], right[place], out=space[: len(rows)])
    return found
