"""A stage: one run of layers with the ends of its boundaries. Parameter names are global: they do not depend on the cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.config.sections import AdapterConfig, ModelConfig
from thinwire.model.adapter import AdaptedLinear, FrozenEmbedding, adapt
from thinwire.model.architecture import find_architecture
from thinwire.model.block import Dropout, KVCache, Pass
from thinwire.model.cut import StagePlan, constrained_layers
from thinwire.model.documents import Documents
from thinwire.model.ends import Context, Learning, Measuring, Shared, StageCodec
from thinwire.model.initial import EMBEDDING_STD, OwnGenerator, draw_normal
from thinwire.model.loss import fused_loss
from thinwire.model.names import EMBEDDING, HEAD, split_block_name
from thinwire.model.noise import key
from thinwire.model.stream import Stream
from thinwire.model.targets import Targets, split_marked


class Runner:
    """How a stage runs its blocks: plainly here; `memory/execute.py` recomputes and offloads what they keep for their backward."""

    problem: ValueError | None = None
    """What went wrong in it, should an engine have put it into other words."""

    def microbatch(self, step: int, received: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Surround the forward of one microbatch of a step, made from what the stage has received."""
        return nullcontext()

    def run(self, block: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        """Run the next block; it may be called again in backward."""
        return block(stream)

    def close(self) -> None:
        """Give back what it holds."""


PLAIN = Runner()


class Static:
    """What a stage knows of the tokens without any wire: computed once for a forward, and again where a block is run again."""

    def __init__(self, stream: Stream, ids_BT: Tensor) -> None:
        self._compute = partial(stream.static, ids_BT)
        self._value = self._compute()

    def __call__(self) -> Tensor | None:
        return self._compute() if self._value is None else self._value

    def forget(self) -> None:
        """Let the memory go at the end of a forward: blocks that are run again in backward hold on to this object."""
        self._value = None


class Stage(nn.Module):
    """Run the plan's layers; the first stage embeds, the last one computes the loss."""

    stream: Stream
    embedding: nn.Embedding | FrozenEmbedding
    head: nn.Module
    dtype: torch.dtype
    """Number format of what is trained, and of loss and logits."""

    def __init__(self, model: ModelConfig, plan: StagePlan, codec: StageCodec, constrained: int, seed: int) -> None:
        super().__init__()
        self.model, self.plan, self.seed, self.constrained = model, plan, seed, constrained
        self.architecture = find_architecture(model.architecture)
        self.runner, self.dtype = PLAIN, codec.compute
        self.frozen: frozenset[str] = frozenset()
        """Names of the tensors that are not trained, nor in any checkpoint: the base of an adapter."""
        self.adapted: dict[int, list[AdaptedLinear]] = {}
        """The linear layers with adapters, by layer."""
        width, sent_width, self.stream = codec.width, codec.sent_width, codec.stream(plan)
        with OwnGenerator(key(seed, plan.layers.start)):  # nothing of it stays: `_initialise` draws by name
            self._build_layers(width, sent_width)
        with OwnGenerator(key(seed, plan.layers.start)):  # what ends draw at the start depends on the seed and their place alone
            before, behind = codec.at(plan.layers.start), codec.at(plan.layers.stop)
            entry, exit = before.ends(plan) if before is behind else (before.ends(plan)[0], behind.ends(plan)[1])
        self.entries = nn.ModuleDict({str(plan.layers.start): entry} if entry else {})
        self.exits = nn.ModuleDict({str(plan.layers.stop): exit} if exit else {})
        self.to(codec.compute)
        tables = self.architecture.tables(model, range(model.context))
        self.table_names = [f"table_{index}" for index in range(len(tables))]
        for name, table in zip(self.table_names, tables, strict=True):
            self.register_buffer(name, table.to(codec.compute), persistent=False)
        self.matrices = {
            name for name, each in self.named_parameters() if each.dim() == 2 and (name == HEAD or split_block_name(name) is not None)
        }
        """Names of the matrices of blocks and head."""
        self.axes = self._coordinate_axes()
        """Names of the parameters that hold subspace coordinates, with the axis (K) along which they do."""
        for name, parameter in self.named_parameters():
            self._initialise(name, parameter)
        if model.tied_head and plan.first and plan.last:
            self.head = TiedHead(self.embedding.weight)

    def _build_layers(self, width: int, sent_width: int) -> None:
        """Make embedding, blocks and head, as far as the plan has them, for a stream of a width that is sent in another."""
        model, plan = self.model, self.plan
        if plan.first:
            self.embedding = nn.Embedding(model.vocabulary, width)
        self.layers = nn.ModuleDict()
        for layer in plan.layers:
            read = width if layer < self.constrained else model.width
            before_exit = layer == plan.layers.stop - 1 and not plan.last
            self.layers[str(layer)] = self.architecture.block(model, layer, read, sent_width if before_exit else read)
        if plan.last:
            self.norm = self.architecture.norm(model)
            self.head = nn.Identity() if model.tied_head else nn.Linear(model.width, model.vocabulary, bias=False)

    @property
    def device(self) -> torch.device:
        """Return where the stage computes."""
        return next(self.parameters()).device

    @property
    def entry(self) -> nn.Module | None:
        """Return the module that reads what the stage receives; the first stage has none."""
        return next(iter(self.entries.values()), None)

    @property
    def exit(self) -> nn.Module | None:
        """Return the module that makes what the stage sends; the last stage has none."""
        return next(iter(self.exits.values()), None)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Return what the architecture's blocks know of the positions of a training sequence."""
        return tuple(self.get_buffer(name) for name in self.table_names)

    def _coordinate_axes(self) -> dict[str, int]:
        """Ask the architecture which parameters write into the stream where that is held in coordinates; the embedding does too."""
        if self.stream.basis() is None:
            return {}
        layers = range(self.plan.layers.start, min(self.plan.layers.stop, self.constrained))
        return ({EMBEDDING: 1} if self.plan.first else {}) | self.architecture.stream_axes(self.model, layers)

    def _initialise(self, name: str, parameter: nn.Parameter) -> None:
        """Draw a matrix from (seed, name), so that every cut starts from the same weights."""
        if name != EMBEDDING and name not in self.matrices:
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            return
        axis, inner = self.axes.get(name), split_block_name(name)
        written = self.architecture.writers(self.model).get(inner[1]) if inner else None
        if self.model.zero_outputs and (written is not None or name == HEAD):
            nn.init.zeros_(parameter)
            return
        if name == EMBEDDING:
            # Unit size, so that a token's own features outweigh the first branches; in coordinates `fixed` plays that part.
            std = EMBEDDING_STD if axis is None else 0.02
        else:
            std = parameter.shape[0 if written == 1 else 1] ** -0.5
        if written is not None:
            std /= math.sqrt(2 * self.model.layers)
        if axis is not None:
            # U has orthonormal columns: this makes U Z write as much into the stream as an unconstrained matrix would.
            std *= math.sqrt(self.model.width / parameter.shape[axis])
        with torch.no_grad():
            parameter.copy_(draw_normal(self.seed, name, parameter.shape) * std)

    def forward(self, ids_BT1: Tensor, payload: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]:
        """Turn ids and the payload received into the payload to send, or into (mean loss,) on the last stage."""
        runner = self.runner if torch.is_grad_enabled() else PLAIN
        with runner.microbatch(context.step, (ids_BT1, *payload)):
            ids_BT, targets = split_marked(ids_BT1, context.rows)
            whole = ids_BT.shape[1] == self.model.context  # tables may depend on the length of the sequence
            tables = self.tables if whole else self._tables_at(range(ids_BT.shape[1]))
            return self._through(ids_BT, payload, context, tables, runner=runner, targets=targets)

    @torch.no_grad()
    def read(self, ids_BT: Tensor, payload: tuple[Tensor, ...], context: Context, cache: KVCache, count: int) -> tuple[Tensor, ...]:
        """Read tokens that follow those in the cache, `count` of them real and the rest padding; return the payload, or (logits,)."""
        first = cache.length if self.model.separator is None else 0  # documents begin anew, at any place
        tables = self._tables_at(range(first, cache.length + count))
        padded = tuple(torch.cat((table, table[-1:].expand(ids_BT.shape[1] - count, *table.shape[1:]))) for table in tables)
        output = self._through(ids_BT, payload, replace(context, before_BT=cache.ids_BT), padded, cache)
        cache.read(ids_BT[:, :count])
        return output

    def predict(self, ids_BT: Tensor, payload: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]:
        """Turn the ids of a text of any length, from its beginning, and the payload received into the payload, or into (logits,)."""
        return self._through(ids_BT, payload, context, self._tables_at(range(ids_BT.shape[1])))

    def _tables_at(self, positions: range) -> tuple[Tensor, ...]:
        """Return what the architecture's blocks know of some positions."""
        return tuple(table.to(self.device, self.dtype) for table in self.architecture.tables(self.model, positions))

    def _through(
        self,
        ids_BT: Tensor,
        payload: tuple[Tensor, ...],
        context: Context,
        tables: tuple[Tensor, ...],
        cache: KVCache | None = None,
        runner: Runner = PLAIN,
        targets: Targets | None = None,
    ) -> tuple[Tensor, ...]:
        """Go through entry, layers and exit: return the payload to send, or (logits,) on the last stage, or (loss,) given targets."""
        context = replace(context, kept={})
        static = Static(self.stream, ids_BT)
        if self.plan.first:
            stream = context.kept["embedded"] = self.embedding(ids_BT)
            if self.frozen and runner is not PLAIN:  # a memory budget follows the backward of each block by the gradient of its input
                stream = stream.requires_grad_()
        else:
            stream = self._end(self.entries)(payload, ids_BT, context)
        dropout = Dropout(self.seed, context.step, context.samples_B, context.training)
        separator, before_BT = self.model.separator, None if cache is None else cache.ids_BT
        each = Pass(tables, dropout, cache, None if separator is None else Documents(ids_BT, separator, before_BT))
        for layer in self.plan.layers:
            stream = runner.run(partial(self._layer, layer, static, each), stream)
        if self.plan.last:
            stream = runner.run(partial(self._finish, static, targets), stream)
        static.forget()
        return (stream,) if self.plan.last else self._end(self.exits)(stream, ids_BT, context)

    def _layer(self, layer: int, static: Static, each: Pass, stream: Tensor) -> Tensor:
        """Run one layer; on the last stage open the stream to D channels where the free layers begin."""
        if layer == self.constrained:
            stream = self.stream.open(stream, static())
        read = partial(self.stream.read, static=static()) if layer < self.constrained else _as_it_is
        for linear in self.adapted.get(layer, ()):
            linear.drop = each.dropout
        return self.layers[str(layer)](stream, read, each)

    def _finish(self, static: Static, targets: Targets | None, stream: Tensor) -> Tensor:
        """Return the logits, or their mean loss where targets are given."""
        if self.constrained == self.model.layers:
            stream = self.stream.open(stream, static())
        hidden_BTD = self.norm(stream)
        if self.model.fused_loss and targets is not None:
            weight_VD = self.head.borrowed[0] if isinstance(self.head, TiedHead) else self.head.get_parameter("weight")
            if (loss := fused_loss(hidden_BTD, weight_VD, targets)) is not None:
                return loss
        logits = self.head(hidden_BTD).to(self.dtype)
        if cap := self.model.logit_cap:
            logits = cap * logits * torch.rsqrt(logits.square() + cap**2)
        return logits if targets is None else targets.loss(logits)

    def owned(self) -> list[Shared]:
        """List what this stage's exit owns and shares with the next stage."""
        return [module for module in self.exits.modules() if isinstance(module, Shared)]

    def copies(self) -> list[Shared]:
        """List this stage's copies of what the stage before owns."""
        return [module for module in self.entries.modules() if isinstance(module, Shared)]

    def trained(self) -> dict[str, nn.Parameter]:
        """Return by name the parameters that this stage's optimizer updates: all but frozen ones and those shared with a neighbour."""
        apart = {id(shared.weight) for shared in (*self.owned(), *self.copies())}
        return {name: each for name, each in self.named_parameters() if id(each) not in apart and name not in self.frozen}

    def commit_ends(self) -> None:
        """End a step that all have agreed on at the boundaries, where both sides do the same.

        What learns by itself learns; gradients of what is shared are dropped: they count only in the steps after which it is updated.
        """
        for module in (*self.entries.modules(), *self.exits.modules()):
            if isinstance(module, Shared):
                module.weight.grad = None
            elif isinstance(module, Learning):
                module.commit()

    def figures(self) -> dict[str, float]:
        """Return what the ends have measured of the step, named by the layer behind their boundary."""
        ends = [(layer, module) for part in (self.entries, self.exits) for layer, end in part.items() for module in end.modules()]
        return {
            f"{name}_{layer}": value for layer, module in ends if isinstance(module, Measuring) for name, value in module.figures().items()
        }

    @staticmethod
    def _end(ends: nn.ModuleDict) -> nn.Module:
        (end,) = ends.values()
        return end


class TiedHead(nn.Module):
    """Use another module's embedding as head; that module owns, updates and saves the weights."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.borrowed = (weight_VD,)  # inside a tuple, so that it is not registered a second time

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        return functional.linear(hidden_BTD, self.borrowed[0])


def build_stage(
    model: ModelConfig, ranges: list[range], index: int, codec: StageCodec, seed: int, adapter: AdapterConfig | None = None
) -> Stage:
    """Make one stage of a model that is cut into these ranges of layers, with an adapter if there is one."""
    constrained = constrained_layers(model, ranges) if codec.constrains else 0
    stage = Stage(model, StagePlan(index, len(ranges), ranges[index]), codec, constrained, seed)
    if adapter is not None and adapter.rank:
        adapt(stage, adapter)
        if isinstance(getattr(stage, "head", None), TiedHead):
            stage.head = TiedHead(stage.embedding.weight)
    return stage


def build_stages(
    model: ModelConfig, ranges: list[range], codec: StageCodec, seed: int, adapter: AdapterConfig | None = None
) -> list[Stage]:
    """Make all stages of one model in this process; they share one basis."""
    stages = [build_stage(model, ranges, index, codec, seed, adapter) for index in range(len(ranges))]
    for stage in stages[1:]:
        stage.stream.adopt(stages[0].stream.basis())
    if model.tied_head:
        stages[-1].head = TiedHead(stages[0].embedding.weight)
    return stages


def _as_it_is(stream: Tensor) -> Tensor:
    return stream
