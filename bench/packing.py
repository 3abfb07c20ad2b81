"""Time the packing of a dense payload's codes: as torch does it where they are, and as numpy did it.

    python bench/packing.py --width 4096 --tokens 4096

Both make the same bytes, which is checked; rounds alternate, and the middle of their times is shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from thinwire.bits.codes import pack_codes, packed_size, unpack_codes
from thinwire.bits.grid import FORMAT, make_grid
from thinwire.bits.raw import Buffer, TensorSpec


def numpy_pack(codes: Tensor, bits: int, lowest: int) -> bytes:
    """Put eight codes together in a word of 64 bits, of which `bits` bytes are kept."""
    unsigned = (codes.detach().flatten().cpu() - lowest).to(torch.int64).numpy().view(np.uint64)
    words = np.zeros((len(unsigned) + 7) // 8, dtype="<u8")
    for place in range(8):
        part = unsigned[place::8]
        words[: len(part)] |= part << np.uint64(place * bits)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()[: packed_size(len(unsigned), bits)]


def numpy_unpack(data: Buffer, bits: int, spec: TensorSpec, lowest: int) -> Tensor:
    """Undo `numpy_pack`."""
    packed, count = np.frombuffer(data, dtype=np.uint8), torch.Size(spec.shape).numel()
    words = np.zeros(((count + 7) // 8, 8), dtype=np.uint8)
    padded = np.zeros(len(words) * bits, dtype=np.uint8)
    padded[: len(packed)] = packed
    words[:, :bits] = padded.reshape(-1, bits)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    unsigned = ((words.view("<u8") >> shifts) & np.uint64(2**bits - 1)).ravel()[:count].astype(np.int64)
    return torch.from_numpy(unsigned + lowest).to(spec.dtype).view(spec.shape)


def middle_times(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the middle time of each way in milliseconds, the ways in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    values = torch.randn(1, given.tokens, given.width, generator=torch.Generator().manual_seed(0))
    print("bits   pack: numpy ms  torch ms   times   unpack: numpy ms  torch ms   times")
    for bits in (8, 4, 3, 2, 1):
        grid = make_grid(bits)
        codes, spec = grid.quantize(values)[0], TensorSpec.raw(tuple(values.shape), FORMAT)
        data = pack_codes(codes, bits, grid.lowest)
        assert data == numpy_pack(codes, bits, grid.lowest) and torch.equal(codes, unpack_codes(data, bits, spec, grid.lowest))
        ways: dict[str, Callable[[], object]] = {
            "numpy pack": lambda codes=codes, bits=bits, low=grid.lowest: numpy_pack(codes, bits, low),
            "torch pack": lambda codes=codes, bits=bits, low=grid.lowest: pack_codes(codes, bits, low),
            "numpy unpack": lambda data=data, bits=bits, low=grid.lowest, spec=spec: numpy_unpack(data, bits, spec, low),
            "torch unpack": lambda data=data, bits=bits, low=grid.lowest, spec=spec: unpack_codes(data, bits, spec, low),
        }
        found = middle_times(ways, given.rounds)
        parts = [(found[f"numpy {way}"], found[f"torch {way}"]) for way in ("pack", "unpack")]
        print(f"{bits:4d}" + "".join(f"  {before:15.1f} {now:9.1f} {before / now:7.1f}" for before, now in parts))


if __name__ == "__main__":
    main()
