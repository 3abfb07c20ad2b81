"""Every codec in every number format of wire and computation: three steps in workers have the bits of one process.

Where the wire's format is the computation's, a stage works on the very tensor that torch's engine receives every later step into.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import get_args

import pytest

from jobs import local_roster, train_stage
from memory.forced import train_forced
from patience import HANG
from runs import train
from thinwire.config.registry import CODECS
from thinwire.config.sections import Dtype
from thinwire.run.command import parse_train

SHORT = ("--train.steps", "3", "--train.checkpoint_every", "0", "--train.validate_every", "0")
DTYPES = get_args(Dtype)
QUICK = {
    ("dense", "fp32", "fp32"),
    ("subspace", "fp32", "fp32"),
    ("lossless", "fp32", "fp32"),
    ("topk", "fp32", "fp32"),
    ("subspace", "fp64", "fp64"),
    ("subspace", "fp32", "bf16"),
    ("anchored", "bf16", "fp32"),
}
"""The cases of `make test`: codec, wire, computation."""
MATRIX = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full, id="-".join(case))
    for case in itertools.product(CODECS.names(), DTYPES, DTYPES)
]


def train_workers(pool, identities, config: str, run: Path, *words: str) -> dict:
    """Train two stages in the session's worker processes; return the summary."""
    command = parse_train(["--config", config, "--run", str(run), "--train.threads", "1", "--pipeline.mode", "workers", *words])
    roster = local_roster(identities, 2)
    jobs = [(command.config, stage, roster, identities[stage], command.run) for stage in range(2)]
    return pool.run(train_stage, jobs, timeout=HANG)[0]["summary"]


@pytest.mark.parametrize("name, wire, compute", MATRIX)
def test_three_steps_have_the_bits_of_one_process(pool, identities, config, tmp_path, name, wire, compute):
    words = (*SHORT, "--codec.name", name, "--codec.dtype", wire, "--train.dtype", compute)
    alone = train(config, tmp_path / "alone", *words)
    together = train_workers(pool, identities, config, tmp_path / "together", *words)
    assert together["steps"] == 3 and together["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "subspace" else pytest.mark.full) for name in CODECS.names()])
def test_within_a_budget(config, tmp_path, name):
    """Blocks are offloaded, recomputed and kept in turn, in as little room as that can do with."""
    words = (*SHORT, "--codec.name", name, "--codec.dtype", "fp32", "--pipeline.microbatches", "4", "--model.dropout", "0.1")
    alone = train(config, tmp_path / "alone", *words)
    tight = train_forced(config, tmp_path / "tight", "ork", *words)
    assert tight["weights_sha256"] == alone["weights_sha256"]
    assert [stage["choices"][:2] for stage in tight["memory"]] == [["offload", "recompute"]] * 2
    assert all(stage["peak"] <= stage["budget"] for stage in tight["memory"])


HYBRIDS = {
    "zhybrid": "hybrid:preset=zhybrid,high_rate=32 --codec.name dense --codec.dtype fp32",
    "mzhybrid": "hybrid:preset=mzhybrid --codec.name lossless --codec.dtype fp32",
}


@pytest.mark.parametrize("preset", HYBRIDS)
def test_replicas_with_hybrid(config, tmp_path, preset):
    """Their boundaries in fp32, as the policy demands; both replicas end with the same weights."""
    pytest.importorskip("zfpy")
    grid = ("--pipeline.mode", "workers", "--replicas.count", "2", "--train.batch", "8")
    words = (*SHORT, *grid, "--replicas.exchange", *HYBRIDS[preset].split())
    hashes = train(config, tmp_path / "run", *words)["weights_sha256"]
    assert hashes[:2] == hashes[2:] and hashes[0] != hashes[1]
