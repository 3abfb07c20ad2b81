"""The model card of an exported folder: what it is, how to use it, and the figures of its run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinwire.hf.checkpointed import Checkpointed
from thinwire.hf.description import form_of, title_of
from thinwire.hf.links import is_inside
from thinwire.hf.measure import Losses
from thinwire.hf.tokenizer import KEPT_FOLDER, kept_notes

SUMMARY = "summary.json"
HEAD = """---
library_name: {library}
pipeline_tag: text-generation
tags:
- {tag}
- thinwire
---

# {name}

"""
PLAIN = """A {title}-style decoder, trained in pipeline stages by thinwire and exported as a plain Hugging Face {title}.
{exact}

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")

To train on: `thinwire import {name} --run runs/more`, then `thinwire train --run runs/more --resume`.
"""
ADAPTER = """An adapter (LoRA) for {base}, a {title}, trained in pipeline stages by thinwire. It needs that model beside it:

    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{name}")

To train on: `thinwire import BASE --adapter {name} --run runs/more`, then `thinwire train --run runs/more --resume`.
"""
OWN = """A {title}-style decoder, trained in pipeline stages by thinwire. **This is not a plain Hugging Face {title}**:
{reason}.
No {title} of the same shape computes the same function, so this is a thinwire folder: settings, tokenizer and weights per stage, without
the state of the optimizer. It is read by

    thinwire eval {name}
    thinwire generate {name} --prompt "..."
"""


def write_card(path: Path, name: str, source: Checkpointed, losses: Losses, kind: str | torch.dtype, *, adapter: bool = False) -> None:
    """Write README.md; `kind` is the number format of a plain folder, or of an adapter alone, or the reason why the folder is neither."""
    reason = kind if isinstance(kind, str) else None
    title, tag = title_of(source.config.model), "pytorch" if reason else form_of(source.config.model).model_type
    head = HEAD.format(library="thinwire" if reason else "peft" if adapter else "transformers", tag=tag, name=name)
    form = ADAPTER if adapter else OWN if reason else PLAIN
    body = form.format(title=title, reason=reason, exact=exactness(source), name=name, base=kept_notes(source.run).get("name"))
    dtype = source.dtype if isinstance(kind, str) else kind
    figures = "\n## Figures\n\n" + table(source, losses, read_summary(source.run), dtype)
    path.write_text(head + body + figures + commands(source, name), encoding="utf-8")


def exactness(source: Checkpointed) -> str:
    """Say in what sense the weights are those of the run."""
    if "stream.basis_DK" in source.tensors:
        return (
            "Trained in a subspace ([arXiv 2506.01260](https://arxiv.org/abs/2506.01260)); its matrices were multiplied out in fp64\n"
            "(Wo = U Zo, W2 = U Z2, embedding = fixed + E U^T): the same network."
        )
    if source.config.adapter.rank:
        return "The weights are the base's plus what its adapter adds (W + alpha / rank B A), multiplied out in fp64."
    return "The weights are those of the run: what crossed its boundaries was rounded or chosen, the network is the same."


def read_summary(run: Path) -> dict[str, Any]:
    """Return the run's figures, none where it has not finished."""
    try:
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8")) if is_inside(run, run / SUMMARY) else None
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def table(source: Checkpointed, losses: Losses, summary: dict[str, Any], dtype: torch.dtype) -> str:
    """Write the figures as a table."""
    config, step = source.config, source.step
    train = config.train
    rows = [("steps", f"{step:,}"), ("tokens", f"{step * train.batch * config.model.context:,}")]
    rows += [("validation loss, boundaries as trained", loss_or_reason(losses.trained, losses))]
    rows += [("validation loss, no boundary (the plain network)", loss_or_reason(losses.plain, losses))]
    if summary.get("steps") == step:
        rows += [("validation loss at the end of the run", f"{summary['val_loss']:.4f}")]
    options = ", ".join(f"{key} {value}" for key, value in asdict(config.codec).items() if value is not None and key != "name")
    rows += [("codec", f"{config.codec.name} ({options})"), ("stages", str(config.pipeline.stages))]
    traffic = [summary.get(f"bytes_per_token_{way}") for way in ("forward", "backward")]
    if None not in traffic:
        rows += [("payload bytes per token and boundary", f"{traffic[0]:.1f} forward, {traffic[1]:.1f} backward")]
    rows += [("trained parameters", f"{summary['trainable_parameters']:,}")] if "trainable_parameters" in summary else []
    rows += [("data", data_name(config.data.source)), ("context", str(config.model.context)), ("compute", train.dtype)]
    rounded = "" if torch.promote_types(dtype, source.dtype) == dtype else f", rounded from {source.dtype}; the losses are from before that"
    rows += [("weights", f"{dtype}{rounded}".replace("torch.", ""))]
    lines = ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines) + "\n"


def loss_or_reason(loss: float | None, losses: Losses) -> str:
    """Write a loss, or why there is none."""
    if loss is not None:
        return f"{loss:.4f} ({losses.sequences} sequences)"
    reason = losses.why_not or "the boundaries are part of the network"
    return "not measured: " + " ".join(reason.replace("|", "\\|").split())


def data_name(source: str) -> str:
    """Name a source without the folders of the machine that it was on."""
    return source if source.startswith("hf:") else Path(source).name


def commands(source: Checkpointed, name: str) -> str:
    """Say what made this folder."""
    run = source.run.resolve().name
    first = f"    thinwire train --config config.toml --run runs/{run}"
    if (source.run / KEPT_FOLDER).is_dir():
        first = f"    thinwire import FOLDER --run runs/{run}\n    thinwire train --run runs/{run} --resume"
    lines = [first, f"    thinwire export runs/{run} out/{name} --step {source.step}"]
    return "\nMade by (`config.toml`: the settings that the run folder keeps)\n\n" + "\n".join(lines) + "\n"
