"""How numbers become bytes between replicas, and back. A packing may be lossy; both ends see exactly what `unpack` makes of the bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.replicas.peers import split_sizes


class Raw:
    """The numbers as they are."""

    def pack(self, matrices: Sequence[Tensor]) -> bytes:
        """Turn matrices into bytes."""
        return b"".join(matrix.detach().cpu().contiguous().numpy().tobytes() for matrix in matrices)

    def unpack(self, data: bytes, like: Sequence[Tensor], peer: int) -> list[Tensor]:
        """Return matrices of the same shapes and dtypes as `like`; refuse bytes of another length, which `peer` has sent."""
        parts = split_sizes(data, [matrix.nbytes for matrix in like], peer)
        return [_tensor(part, matrix) for part, matrix in zip(parts, like, strict=True)]


def _tensor(part: memoryview, like: Tensor) -> Tensor:
    """Copy bytes into memory of torch's own: results must not depend on how a message happened to be aligned."""
    dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
    return torch.from_numpy(np.frombuffer(part, dtype).copy()).view(like.shape).to(like.device)
