"""What cannot keep documents apart is refused by name, before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.codecs.build import codec_defaults
from thinwire.config.sections import DataConfig, RunConfig
from thinwire.data.open import open_data
from thinwire.run.check import check

CONFIG = RunConfig(codec=codec_defaults("dense"))


def test_documents_apart_pass():
    check(replace(CONFIG, model=replace(CONFIG.model, separator=0)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"separator": 4096}, "model.separator is 4096; it is one of the tokens, 0 to 4095"),
        ({"separator": -1}, "model.separator is -1"),
        ({"separator": 0, "rope_kind": "dynamic"}, "model.separator lets positions begin anew"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(model, message):
    with pytest.raises(ValueError, match=message):
        check(replace(CONFIG, model=replace(CONFIG.model, **model)))


@pytest.mark.parametrize(("name", "options"), [("lowrank", {}), ("randomk", {}), ("topk", {"per": "sample"})])
def test_codecs_that_look_at_a_whole_sequence_are_refused(name, options):
    config = replace(CONFIG, codec=codec_defaults(name, **options))
    check(config)
    with pytest.raises(ValueError, match=f"the codec '{name}' looks at a whole sequence"):
        check(replace(config, model=replace(CONFIG.model, separator=0)))


def test_a_token_that_ends_no_document_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some words to read\n" * 200)
    data, model = DataConfig(source=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache")), replace(CONFIG.model, vocabulary=300)
    with pytest.raises(ValueError, match=r"model.separator is 3, but this tokenizer's documents end with token 0 \(<\|end\|>\)"):
        open_data(data, replace(model, separator=3), 0)
    assert len(open_data(data, replace(model, separator=0, context=16), 0).train)
