"""The engine of the house: a list of actions, run one after another over the ports to the neighbours.

It computes the same bits as torch's pipeline engine (`pipeline/torch_engine.py`) with public names of torch alone, so it runs on releases
whose engine is another. It knows no schedule: any list in which a microbatch's forward precedes its backward, and each kind comes in the
order of the microbatches, is one that it can run. The neighbour may run another list, and another engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.pipeline.backend import Port
from thinwire.pipeline.engine_module import IDS_DTYPE, EngineModule
from thinwire.pipeline.order import Action


@dataclass(frozen=True)
class Held:
    """What a forward keeps for its backward."""

    received: tuple[Tensor, ...]
    """Leaves of the graph: their gradients go to the stage before."""
    sent: tuple[Tensor, ...]
    """Ends of the graph: their gradients come from the next stage. On the last stage its share of the loss."""


class OwnExecutor:
    """Run one stage's microbatches in a given order."""

    def __init__(
        self,
        module: EngineModule,
        ports: Mapping[int, Port],
        microbatch: int,
        actions: Sequence[Action],
        share: Callable[[Tensor], Tensor],
    ) -> None:
        """Run these actions of microbatches of so many sequences; nothing is kept from one run to the next, whatever ends it."""
        index = module.stage.plan.index
        self.module, self.microbatch, self.actions, self.share = module, microbatch, actions, share
        self.left, self.right = ports.get(index - 1), ports.get(index + 1)

    def run(self, batch_BT1: Tensor | None, samples_B: Tensor, learning: bool) -> list[Tensor]:
        """Run every microbatch of a batch; return what the last stage's share of each loss is, on the others nothing."""
        ids = () if batch_BT1 is None else batch_BT1.split(self.microbatch)
        samples = samples_B.split(self.microbatch)
        held: dict[int, Held] = {}
        losses: list[Tensor] = []
        for kind, microbatch in self.actions:
            if kind == "F":
                forward = self._forward(ids[microbatch] if ids else None, samples[microbatch], learning)
                if self.module.last:
                    losses.append(forward.sent[0].detach())
                if learning:
                    held[microbatch] = forward
                del forward  # else the last one would outlive its backward
            elif learning:
                self._backward(held.pop(microbatch))
        return losses

    def _forward(self, ids_BT1: Tensor | None, samples_B: Tensor, learning: bool) -> Held:
        """Compute a microbatch, of which the first stage is given the ids, and send it on."""
        received: tuple[Tensor, ...] = ()
        if self.left is not None:
            ids_BT1, *payload = self._receive(self.left)
            received = tuple(tensor.requires_grad_(learning) for tensor in payload)
        output = self.module(ids_BT1, *received, samples_B=samples_B)
        if isinstance(output, Tensor):
            return Held(received, (self.share(output),))
        assert self.right is not None
        for tensor in output:
            self.right.send(tensor)
        _, *sent = output  # no gradient comes back for ids
        return Held(received, tuple(sent))

    def _backward(self, held: Held) -> None:
        """Accumulate the gradients of a microbatch, and send those of what was received back."""
        gradients = [None] if self.right is None else self._receive(self.right)
        pairs = [(tensor, gradient) for tensor, gradient in zip(held.sent, gradients, strict=True) if tensor.requires_grad]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        if self.left is None:
            return
        for tensor in held.received:
            self.left.send(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def _receive(self, port: Port) -> list[Tensor]:
        """Wait for a microbatch's tensors; they get memory of their own, for the graph may keep them until the backward."""
        ids = (self.microbatch, self.module.ids_width), IDS_DTYPE
        forms = [ids if slot.index is None else (slot.spec.shape, slot.spec.dtype) for slot in port.incoming]
        tensors = [torch.empty(shape, dtype=dtype, device=self.module.device) for shape, dtype in forms]
        for receipt in [port.post(tensor) for tensor in tensors]:
            receipt.wait()
        return tensors
