"""Record the weights of many short runs, and check that they are still the same, bit for bit.

    .venv/bin/python bench/golden.py --check             # all runs against bench/results/golden.json, about a minute
    .venv/bin/python bench/golden.py --check drift ist   # those whose names contain a word
    .venv/bin/python bench/golden.py --check --engine own    # the same, run by thinwire's own pipeline engine
    .venv/bin/python bench/golden.py --record            # write the file anew

Hashes hold for one kind of processor and one version of torch, which the file names: another kind rounds otherwise.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import random
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from thinwire.cli.main import main as thinwire

FILE = Path(__file__).parent / "results" / "golden.json"
TINY = """
--model.vocabulary 320 --model.width 32 --model.layers 4 --model.heads 4 --model.kv_heads 2 --model.ffn 48 --model.context 16
--train.steps 4 --train.batch 4 --train.warmup 2 --train.validation_sequences 4 --train.checkpoint_every 2
--pipeline.stages 2 --pipeline.microbatches 2
"""
WORKERS, INPROCESS = "--pipeline.mode workers", "--pipeline.mode inprocess"
CODECS = {
    "dense": "",
    "dense-fp32-wire": "--codec.dtype fp32",
    "subspace": "--codec.rank 8",
    "subspace-4-bits": "--codec.rank 8 --codec.bits 4",
    "subspace-8-bits-stochastic": "--codec.rank 8 --codec.bits 8 --codec.rounding stochastic",
    "subspace-drift": "--codec.rank 8 --codec.drift_every 2",
    "anchored": "--codec.rank 8",
    "anchored-fixed": "--codec.rank 8 --codec.projector fixed",
    "anchored-learned": "--codec.rank 8 --codec.projector learned --codec.projector_every 2",
    "anchored-factorised": "--codec.rank 8 --codec.anchors factorised --codec.anchor_rank 4",
    "anchored-ngrams": "--codec.rank 8 --codec.ngrams 2 --codec.buckets 64 --codec.anchor_rank 4 --codec.bits 3",
    "quantize": "--codec.bits 8",
    "quantize-4-bits": "--codec.bits 4 --codec.backward_bits 8",
    "quantize-warm-up": "--codec.bits 4 --codec.warmup 2",
    "quantize-from-layer": "--codec.bits 4 --codec.from_layer 2",
    "topk": "--codec.density 0.25",
    "topk-sample": "--codec.density 0.25 --codec.per sample",
    "randomk": "--codec.density 0.25",
    "threshold": "--codec.density 0.25",
    "autoencoder": "--codec.channels 8",
    "bottleneck": "--codec.channels 8",
    "hadamard": "--codec.bits 4",
    "lossless": "",
    "lowrank": "--codec.rank 4",
}
EXCHANGES = {
    "allreduce": "allreduce",
    "hybrid": "hybrid",
    "hybrid-zhybrid": "hybrid:preset=zhybrid",
    "hybrid-mzhybrid": "hybrid:preset=mzhybrid",
    "powersgd": "powersgd:rank=2",
    "powersgd-warm-up": "powersgd:rank=2,warmup=2",
    "threshold": "threshold",
    "gravac": "gravac",
    "powergossip": "powergossip",
    "local": "local:steps=2",
    "local-momentum": "local:steps=2,rate=0.7,momentum=0.5",
    "ist": "ist:steps=2",
}
DENSE = "--codec.name dense"
SUBSPACE = "--codec.name subspace --codec.rank 8"
OTHERS = {
    "stages-1": f"{INPROCESS} {SUBSPACE} --pipeline.stages 1",
    "stages-1-worker": f"{WORKERS} {SUBSPACE} --pipeline.stages 1",
    "stages-3": f"{WORKERS} {SUBSPACE} --pipeline.stages 3 --pipeline.split 1,2,1",
    "stages-4": f"{WORKERS} {SUBSPACE} --pipeline.stages 4",
    "stages-8": f"{WORKERS} {SUBSPACE} --pipeline.stages 8 --model.layers 8",
    "stages-8-inprocess": f"{INPROCESS} {SUBSPACE} --pipeline.stages 8 --model.layers 8",
    "dropout": f"{WORKERS} {SUBSPACE} --model.dropout 0.1",
    "dropout-inprocess": f"{INPROCESS} {SUBSPACE} --model.dropout 0.1",
    "output-ingredients": f"{WORKERS} {DENSE} --model.output_bias --model.branch_norm_gains --model.output_dropout 0.1",
    "tied-head": f"{INPROCESS} {DENSE} --model.tied_head",
    "adamw": f"{WORKERS} {SUBSPACE} --train.optimizer adamw",
    "muon": f"{WORKERS} {SUBSPACE} --train.optimizer muon",
    "fp64": f"{WORKERS} {SUBSPACE} --train.dtype fp64",
    "gpipe": f"{WORKERS} {SUBSPACE} --pipeline.schedule gpipe",
    "1f1b": f"{WORKERS} {SUBSPACE} --pipeline.schedule 1f1b",
    "budget": f"{WORKERS} {DENSE} --memory.budget 1.46MB",
    "budget-inprocess": f"{INPROCESS} {DENSE} --memory.budget 1.46MB",
    "free-layers": f"{WORKERS} {SUBSPACE} --model.free_layers 1",
    "replicas-ring": f"{WORKERS} {SUBSPACE} --replicas.count 3 --replicas.graph ring --train.batch 6 --replicas.exchange powergossip",
    "thin-line": f"{WORKERS} {SUBSPACE} --link.profile 20mbps_30ms",
}


def commands() -> dict[str, list[str]]:
    """List the runs by name: the options of each command that makes it, one after the other."""
    runs = {}
    for name, options in CODECS.items():
        codec = name.partition("-")[0]
        for mode in (WORKERS, INPROCESS):
            runs[f"codec-{name}-{mode.split()[1]}"] = [f"{mode} --codec.name {codec} {options}"]
    for name, exchange in EXCHANGES.items():
        codec = {"hybrid-zhybrid": "--codec.name dense", "hybrid-mzhybrid": "--codec.name lossless --codec.dtype fp32"}
        boundary = codec.get(name, SUBSPACE)
        runs[f"exchange-{name}"] = [f"{WORKERS} {boundary} --replicas.count 2 --replicas.exchange {exchange}"]
    for name, options in OTHERS.items():
        runs[name] = [options]
    for name, first, then in (("same-shape", WORKERS, WORKERS), ("other-mode", WORKERS, INPROCESS)):
        runs[f"resume-{name}"] = [f"{first} {SUBSPACE} --train.steps 2", f"--resume {then} --train.steps 4"]
    runs["resume-more-stages"] = [
        f"{INPROCESS} {SUBSPACE} --train.steps 2",
        f"--resume {WORKERS} --pipeline.stages 3 --pipeline.split 1,1,2 --train.steps 4",
    ]
    return runs


def write_corpus(path: Path) -> None:
    """Write a text that is the same on every machine."""
    chance = random.Random(0)
    words = ["".join(chance.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(chance.randint(2, 8))) for _ in range(300)]
    lines = [" ".join(chance.choice(words) for _ in range(10)) + "." for _ in range(3000)]
    path.write_text("\n".join(lines))


def run(name: str, options: list[str], folder: Path, engine: str) -> dict:
    """Train as the commands say, on one of the pipeline engines; return the hashes of the weights."""
    common = f"--data.source {folder / 'corpus.txt'} --data.cache {folder / 'cache'} --device cpu --seed 3 {TINY}".split()
    target = folder / name
    for number, text in enumerate(options):
        words = ["train", "--run", str(target), *(common if number == 0 else []), *text.split(), "--pipeline.engine", engine]
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            try:
                code = thinwire(words)
            except SystemExit as end:  # the command line was refused
                code = end.code
        if code:
            raise RuntimeError(f"{name}: FAILED: thinwire {' '.join(words)} ended with {code}:\n{said.getvalue()[-800:]}")
    summary = json.loads((target / "summary.json").read_text())
    return {"commands": options, "weights_sha256": summary["weights_sha256"], "model_sha256": summary["model_sha256"]}


def machine() -> dict[str, str]:
    """Say what the bits depend on."""
    return {"torch": torch.__version__, "kernels": torch.backends.cpu.get_cpu_capability(), "machine": platform.machine()}


def main() -> int:
    """Record or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the file instead of checking against it")
    parser.add_argument("--check", action="store_true", help="compare with the file (the default)")
    parser.add_argument(
        "--engine", default="auto", choices=["auto", "torch", "own"], help="what runs the pipeline in workers (default: auto)"
    )
    parser.add_argument("words", nargs="*", help="only runs whose names contain one of these")
    arguments = parser.parse_args()
    chosen = {name: options for name, options in commands().items() if not arguments.words or any(w in name for w in arguments.words)}
    kept = json.loads(FILE.read_text()) if FILE.is_file() else {"machine": machine(), "runs": {}}
    if not arguments.record and kept["machine"] != machine():
        raise SystemExit(f"the hashes in {FILE.name} are of {kept['machine']}, this is {machine()}: they cannot be compared")
    found, different = {}, []
    with tempfile.TemporaryDirectory(prefix="thinwire-golden-") as scratch:
        write_corpus(Path(scratch) / "corpus.txt")
        for name, options in chosen.items():
            try:
                found[name] = run(name, options, Path(scratch), arguments.engine)
            except RuntimeError as error:
                print(error, flush=True)
                different.append(name)
                continue
            same = found[name] == kept["runs"].get(name)
            different += [] if same or arguments.record else [name]
            print(f"{name}: {'recorded' if arguments.record else 'equal' if same else 'DIFFERENT'}", flush=True)
    if arguments.record:
        FILE.write_text(json.dumps({"machine": machine(), "runs": (kept["runs"] if arguments.words else {}) | found}, indent=1) + "\n")
    print(f"{len(found)} runs, {len(different)} different or failed{': ' + ', '.join(different) if different else ''}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
