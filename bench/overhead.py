"""What the subspace method adds to a stage at the size of the paper: memory and time.

    .venv/bin/python bench/overhead.py [--vocabulary 50000] [--width 4096] [--rank 40] [--tokens 512]

Memory: what a stage holds for the method beside its weights, without and with the cached table, against the published form's table.
Time: hashing the frozen features and reading x = fixed + U c, against one block's forward at the same width (F = 2.75 D, fp32).
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

from thinwire.codecs.build import codec_defaults, make_codec
from thinwire.config.sections import ModelConfig
from thinwire.model.block import Dropout, Pass
from thinwire.model.cut import StagePlan
from thinwire.model.llama.block import LlamaBlock
from thinwire.model.llama.rotary import rotary_tables
from thinwire.model.subspace.fixed import CHUNK
from thinwire.model.subspace.stream import SubspaceStream
from timing import alternate, medians


def make_stream(model: ModelConfig, rank: int, cache_mb: float) -> SubspaceStream:
    codec = make_codec(codec_defaults("subspace", rank=rank, fixed_cache_mb=cache_mb), model)
    stream = codec.stream(StagePlan(1, 3, range(1, 2)))
    assert isinstance(stream, SubspaceStream)
    return stream


def held_bytes(stream: SubspaceStream) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in stream.buffers())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for word, default in (("vocabulary", 50_000), ("width", 4096), ("rank", 40), ("tokens", 512), ("repeats", 9)):
        parser.add_argument(f"--{word}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    width, rank = arguments.width, arguments.rank
    model = ModelConfig(
        vocabulary=arguments.vocabulary, width=width, layers=3, heads=32, kv_heads=8, ffn=width * 11 // 4, context=arguments.tokens
    )
    stream = make_stream(model, rank, 0)
    ids_BT = torch.randint(0, arguments.vocabulary, (1, arguments.tokens))
    coordinates = torch.randn(1, arguments.tokens, rank)
    static = stream.static(ids_BT)
    hidden_BTD = stream.read(coordinates, static)
    dense, narrow = LlamaBlock(model, 0, width, width), LlamaBlock(model, 0, rank, rank)
    tables = tuple(table.float() for table in rotary_tables(model, range(model.context)))
    each = Pass(tables, Dropout(0, 0, torch.zeros(1, dtype=torch.int64), False))
    sides = {
        "frozen features from the hash": lambda: stream.fixed.compute(ids_BT),
        "read x = fixed + U c, hash included, twice per block": lambda: stream.read(coordinates, static),
        "dense block, forward": lambda: dense(hidden_BTD, lambda hidden: hidden, each),
        "subspace block, forward, reads included": lambda: narrow(coordinates, lambda c: stream.read(c, static), each),
    }
    found = medians(alternate(sides, arguments.repeats))
    report(arguments, held_bytes(stream), found)


def report(arguments: argparse.Namespace, held: int, found: dict[str, float]) -> None:
    """Print both tables."""
    console = Console()
    table_bytes = arguments.vocabulary * arguments.width
    memory = Table(title=f"memory added per stage, V={arguments.vocabulary:,} D={arguments.width} K={arguments.rank}")
    memory.add_column("form")
    memory.add_column("MB", justify="right")
    chunk = CHUNK * arguments.width * 4
    memory.add_row("basis and sign table", f"{held / 1e6:.2f}")
    memory.add_row(f"features of {CHUNK} tokens while they are added", f"{chunk / 1e6:.2f}")
    memory.add_row("with the table cached in bf16 instead", f"{(held + 2 * table_bytes) / 1e6:.0f}")
    memory.add_row("published form: N(0,1) table in bf16", f"{2 * table_bytes / 1e6:.0f}")
    console.print(memory)
    times = Table(title=f"time for {arguments.tokens} tokens, one thread, fp32, median of {arguments.repeats}")
    times.add_column("part")
    times.add_column("ms", justify="right")
    times.add_column("share of a dense block", justify="right")
    for name, seconds in found.items():
        times.add_row(name, f"{1e3 * seconds:.1f}", f"{100 * seconds / found['dense block, forward']:.2f} %")
    console.print(times)


if __name__ == "__main__":
    main()
