"""The same greedy text from transformers, from one process and from four workers: the exported model is the trained one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runs import train
from thinwire.cli import main as cli

TOKENS = 200


def greedy_text(folder: Path, prompt: str) -> str:
    """Let transformers go on with a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert len(ids) == TOKENS, "the text ended early: choose another prompt"
    return tokenizer.decode(ids)


@pytest.mark.parametrize("words", [(), ("--codec.name", "dense")], ids=["subspace", "dense"])
def test_greedy_text_is_the_same_everywhere(config, tmp_path, capsys, words):
    run, prompt = tmp_path / "run", "41 plus 6 is"
    train(config, run, "--pipeline.stages", "4", "--codec.dtype", "fp32", "--train.steps", "30", "--train.rate", "0.02", *words)
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--sequences", "0"]) == 0
    capsys.readouterr()
    texts = []
    for mode in ("inprocess", "workers"):
        asked = ["--prompt", prompt, "--max-new-tokens", str(TOKENS), "--temperature", "0", "--pipeline.mode", mode]
        assert cli.main(["generate", str(run), *asked]) == 0
        captured = capsys.readouterr()
        assert f"{TOKENS} tokens" in captured.err
        texts.append(captured.out.removesuffix("\n"))
    assert texts == [greedy_text(tmp_path / "out", prompt)] * 2
    assert len(set(texts[0])) > 5  # not one token again and again
