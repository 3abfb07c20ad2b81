"""SPECs and files of them."""

from __future__ import annotations

import pytest

from thinwire.board.cases import with_spec
from thinwire.board.request import parse_spec, parse_specs
from thinwire.board.subjects import CODECS, EXCHANGES
from thinwire.codecs.build import codec_defaults
from thinwire.config.options import options_from_spec
from thinwire.config.sections import ReplicasConfig, RunConfig


def test_a_name_alone():
    spec = parse_spec("dense", CODECS)
    assert (spec.method, spec.options, spec.settings, spec.slug) == ("dense", (), (), "dense")


def test_options_and_config_words():
    spec = parse_spec("anchored:rank=32,bits=4,dtype=fp32,model.ffn=900,model.dropout=0.1,model.tied_head=true,backward_bits=none", CODECS)
    assert spec.options == (("rank", 32), ("bits", 4), ("dtype", "fp32"), ("backward_bits", None))
    assert spec.settings == (("model.ffn", 900), ("model.dropout", 0.1), ("model.tied_head", True))


@pytest.mark.parametrize(
    "text, slug",
    [
        ("anchored:rank=32,bits=4", "anchored-rank32-bits4"),
        ("subspace:rank=16,model.ffn=900", "subspace-rank16-model.ffn900"),
        ("subspace:drift_rate=1e-3", "subspace-drift_rate1e-3"),
        ("odd:path=../x y", "odd-path.._x_y"),
    ],
)
def test_slugs_are_file_names(text, slug):
    assert parse_spec(text, CODECS).slug == slug


@pytest.mark.parametrize("text", ["", ":rank=3", "subspace:", "subspace:rank", "subspace:rank=", "subspace:=3", "subspace:rank=1,,bits=4"])
def test_what_is_no_spec(text):
    with pytest.raises(ValueError, match=r"write NAME\[:OPTION=VALUE"):
        parse_spec(text, CODECS)


def test_a_word_twice():
    with pytest.raises(ValueError, match="gives rank twice"):
        parse_spec("subspace:rank=3,rank=4", CODECS)


def test_a_file_with_headings(tmp_path):
    path = tmp_path / "specs.txt"
    path.write_text(
        "dense\n\n# Equal width\nsubspace:rank=16\n  anchored:rank=8  \n## Equal trainable parameters\nsubspace:model.ffn=900\n"
    )
    specs = parse_specs([f"@{path}", "quantize:bits=4"], CODECS)
    assert [(spec.text, spec.heading) for spec in specs] == [
        ("dense", None),
        ("subspace:rank=16", "Equal width"),
        ("anchored:rank=8", "Equal width"),
        ("subspace:model.ffn=900", "Equal trainable parameters"),
        ("quantize:bits=4", None),
    ]


def test_files_that_say_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*none.txt"):
        parse_specs([f"@{tmp_path / 'none.txt'}"], CODECS)
    (tmp_path / "empty.txt").write_text("# only a heading\n\n")
    with pytest.raises(ValueError, match="holds no spec"):
        parse_specs([f"@{tmp_path / 'empty.txt'}"], CODECS)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        parse_specs([f"@{tmp_path / 'binary.txt'}"], CODECS)


def test_a_spec_twice():
    with pytest.raises(ValueError, match=r"'dense' is given twice"):
        parse_specs(["dense", "subspace", "dense"], CODECS)


@pytest.mark.parametrize(
    "text, exchange, graph, rate",
    [
        ("allreduce", "allreduce", "complete", 3e-3),
        ("local:steps=20,rate=0.7", "local:steps=20,rate=0.7", "complete", 3e-3),
        ("local:replicas.graph=ring,steps=20", "local:steps=20", "ring", 3e-3),
        ("allreduce:train.rate=0.1", "allreduce", "complete", 0.1),
    ],
)
def test_an_exchange_is_a_spec_of_the_configs_own_codec(text, exchange, graph, rate):
    spec = parse_spec(text, EXCHANGES, "Heading")
    assert (spec.text, spec.heading) == (text, "Heading")
    base = RunConfig(codec=codec_defaults("subspace", rank=6), replicas=ReplicasConfig(count=2))
    config, expected = with_spec(spec, base, EXCHANGES), options_from_spec("exchange", exchange)
    assert (config.exchange, config.replicas.graph, config.train.rate, config.codec) == (expected, graph, rate, base.codec)


def test_what_is_no_exchange():
    with pytest.raises(ValueError, match="such as powersgd:rank=4"):
        parse_spec("local:", EXCHANGES)


def test_a_file_of_exchanges(tmp_path):
    (tmp_path / "methods.txt").write_text("allreduce\n# Seldom\nlocal:steps=20\n")
    specs = parse_specs([f"@{tmp_path / 'methods.txt'}", "hybrid"], EXCHANGES)
    assert [(spec.slug, spec.heading) for spec in specs] == [("allreduce", None), ("local-steps20", "Seldom"), ("hybrid", None)]
