"""The options of `thinwire compare`: everything that cannot work is said before anything trains."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from patience import HANG
from thinwire.board import measure
from thinwire.board.cases import prepare
from thinwire.cli import main as cli
from thinwire.cli.compare import parse_compare
from thinwire.codecs.build import codec_defaults
from thinwire.config import registry
from thinwire.run.command import parse_train


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


ERRORS = {
    "": "nothing to compare; give SPECs",
    "dense --redraw=yes": "argument --redraw: ignored explicit argument 'yes'; SPECs come first",
    "dense --all": "both SPECs and --all are given",
    "@none.txt": "cannot read none.txt",
    "dense subspace dense": "'dense' is given twice",
    "dense subspace:rank=8 subspace:rank=8,bits=none": "are the same settings",
    "dense nosuch:rank=3": "spec nosuch:rank=3: unknown codec 'nosuch'; choose one of anchored,",
    "dense subspace:rnk=3": "spec subspace:rnk=3: options: codec 'subspace' has no option 'rnk'; did you mean rank?",
    "dense subspace:rank=x": "codec.rank is 'x'; it must be a whole number",
    "dense subspace:rank=33": "spec subspace:rank=33: codec.rank is 33; it can be 1 to the model width, 32",
    "dense subspace:rank=0": "codec.rank is 0; it can be 1 to",
    "dense subspace:modl.ffn=3": "there is no section 'modl' of the settings for modl.ffn; did you mean model?",
    "dense subspace:model.fn=3": "[model] has no option 'fn'; did you mean ffn?",
    "dense subspace:train.batch=8": "train.batch must be the same for all specs; give it as --train.batch behind the specs",
    "dense subspace:train.steps=8": "train.steps must be the same for all specs; use --steps",
    "dense --links nosuch": "unknown link profile 'nosuch'",
    "dense --links open open": "--links open open names one twice",
    "dense --seeds 1 1": "--seeds 1 1 names one twice",
    "dense --seeds -1": "'-1' is not a whole number of at least 0",
    "dense --seeds 9223372036854775808": "seed is 9223372036854775808",
    "dense --steps 0": "'0' is not a whole number of at least 1",
    "dense --steps": "argument --steps: expected one argument",
    "dense --target low": "argument --target: 'low' is no loss; give a number above 0, such as 4.2",
    "dense --target nan": "'nan' is no loss",
    "dense --speed-steps 2": "'2' is not a whole number of at least 3",
    "dense --name ../x": "--name is '../x'; use letters",
    "dense --name discussion": "--name is 'discussion'",
    "subspace": "there is no plain `dense` among the specs, whose loss would be the target; add dense, or give --target LOSS",
    "dense --train.validate_every 0": "train.validate_every is 0, but the target is dense's validation loss after half of 6 steps",
    "dense --train.steps 9": "--train.steps is not for thinwire compare; use --steps",
    "dense --seed 9": "--seed is not for thinwire compare; use --seeds",
    "dense --codec.rank 9": "options of a codec belong into its SPEC; write NAME:rank=VALUE",
    "dense --train.rte 9": "unknown option --train.rte; thinwire train --help lists all options; did you mean --train.rate?",
    "dense --redrw": "unknown option --redrw; did you mean --redraw?",
    "dense --train.rate 0": "train.rate is 0.0; set --train.rate to a value that is above 0",
    "dense --pipeline.stages 1": "pipeline.stages is 1, so nothing crosses a boundary",
    "dense --out tiny.toml": "cannot write into tiny.toml: File exists; choose another folder with --out",
}


@pytest.mark.parametrize("words", ERRORS, ids=ERRORS)
def test_errors_come_before_any_training(config, tmp_path, words, capsys, monkeypatch):
    monkeypatch.setattr(measure, "train_row", None)
    before = sorted(tmp_path.rglob("*"))
    usual = [] if "validate_every" in words else ["--train.validate_every", "2"]
    assert cli.main(["compare", *words.split(), "--config", config, *usual]) == 2
    assert ERRORS[words] in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_all_codecs_with_their_defaults(config):
    cases = prepare(parse_compare(["--all", "--config", config, "--target", "4", "--model.width", "64"]))
    assert [case.spec.text for case in cases] == registry.CODECS.names()
    assert next(case for case in cases if case.spec.text == "subspace").config.codec == codec_defaults("subspace")


def test_words_go_where_they_belong(config):
    words = "dense subspace:rank=8 --links open --train.validate_every 3 --end_to_end --config"
    command = parse_compare([*words.split(), config, "--steps=8", "--seeds", "3", "4", "--model.ffn", "40", "--redraw"])
    assert command.links == ("open",) and command.seeds == (3, 4) and command.steps == 8 and command.end_to_end and command.redraw
    assert command.options == ("--train.validate_every", "3", "--model.ffn", "40")
    again = parse_compare(shlex.split(command.line)[2:])
    assert again == command
    config_of = prepare(command)[1].learning(4)
    assert (config_of.seed, config_of.train.steps, config_of.train.validate_every, config_of.model.ffn) == (4, 8, 3, 40)
    assert (config_of.codec.rank, config_of.pipeline.mode, config_of.link.profile) == (8, "inprocess", "open")


def test_no_links_is_a_choice(config):
    assert parse_compare(["dense", "--config", config, "--links"]).links == ()


@pytest.mark.parametrize("text", ["dense", "subspace", "subspace:rank=8,bits=4,model.ffn=40,model.dropout=0.1", "quantize:bits=2,warmup=3"])
def test_the_train_line_has_the_settings_of_the_row(config, text):
    """The config's own codec is `subspace` of rank 6, which must not leak into another."""
    words = ["--config", config, "--target", "4", "--steps", "8", "--train.validate_every", "3", "--model.output_dropout", "0"]
    (case,) = prepare(parse_compare([text, *words]))
    for wanted in (case.learning(5), case.over("dsl_2mbps", 5), case.timed("dsl_2mbps", 4)):
        assert parse_train(shlex.split(case.command(wanted))[2:]).config == wanted


def test_a_speed_row_measures_the_compressed_phase(config):
    (case,) = prepare(parse_compare(["quantize:bits=2,warmup=3", "--config", config, "--target", "4"]))
    assert case.warmup == 3 and case.timed("open", 4).codec.warmup == 0


def test_help_and_words_need_no_torch():
    code = "import sys; from thinwire.cli.compare import parse_compare; parse_compare(['dense']); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True).stdout == "False\n"
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--help"])
    assert ended.value.code == 0
