"""The options of `thinwire compare --exchange`, and what is asked of a method before it trains."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from patience import HANG
from thinwire.board import measure
from thinwire.board.cases import Case, prepare
from thinwire.board.score import SpecRows
from thinwire.board.subjects import EXCHANGES
from thinwire.cli import main as cli
from thinwire.cli.compare import parse_compare
from thinwire.config import registry
from thinwire.config.options import options_from_spec, spec_of
from thinwire.run.command import parse_train

PAIR = ("--replicas.count", "2")
ERRORS = {
    "--exchange": "argument --exchange: expected at least one argument",
    "dense --exchange allreduce": "both the SPEC dense and --exchange are given; compare boundary methods or exchanges",
    "--all --exchange allreduce": "both --all and --exchange are given",
    "--exchange allreduce allreduce": "'allreduce' is given twice",
    "--exchange allreduce nosuch": "spec nosuch: unknown exchange 'nosuch'; choose one of allreduce,",
    "--exchange allreduce local:stps=2": "spec local:stps=2: options: exchange 'local' has no option 'stps'; did you mean steps?",
    "--exchange allreduce local:steps=0": "exchange.steps is 0; choose at least 1",
    "--exchange allreduce local local:steps=20": "the specs 'local' and 'local:steps=20' are the same settings",
    "--exchange allreduce local:replicas.count=4": "replicas.count must be the same for all specs; give it as --replicas.count",
    "--exchange local": "there is no plain `allreduce` among the specs, whose loss would be the target; add allreduce",
    "--exchange allreduce --train.validate_every 4": "but the target is allreduce's validation loss after half of 6 steps",
    "--exchange allreduce --replicas.count 1": "replicas.count is 1, and an exchange takes place between replicas; add --replicas.count 2",
    "--exchange allreduce --replicas.count 3": "replicas.count is 3, which does not divide train.batch 4",
    "--exchange allreduce --replicas.exchange local": "name the method, with its options, behind --exchange",
    "--exchange allreduce --exchange.rank 3": "name the method, with its options, behind --exchange",
    "--exchange allreduce --pipeline.mode workers": "--pipeline.mode is not for thinwire compare",
    "--exchange allreduce --codec.name quantize --codec.warmup 3": "codec.warmup is 3: its uncompressed steps would be timed as compressed",
    "dense --replicas.count 2": "replicas.count is 2, but codecs are compared in one replica; leave it out, or compare --exchange METHODs",
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def cases(config: str, *words: str) -> list[Case]:
    return prepare(parse_compare([*words, "--config", config, "--target", "4", *PAIR]))


@pytest.mark.parametrize("words", ERRORS, ids=ERRORS)
def test_errors_come_before_any_training(config, tmp_path, words, capsys, monkeypatch):
    monkeypatch.setattr(measure, "train_row", None)
    before = sorted(tmp_path.rglob("*"))
    usual = [] if "validate_every" in words else ["--train.validate_every", "2"]
    usual += [] if "--replicas.count" in words else PAIR
    assert cli.main(["compare", *words.split(), "--config", config, *usual]) == 2
    assert ERRORS[words] in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_without_replicas_it_says_what_to_add(config, capsys):
    assert cli.main(["compare", "--exchange", "allreduce", "--config", config, "--train.validate_every", "2"]) == 2
    assert "add --replicas.count 2" in capsys.readouterr().err


def test_words_go_where_they_belong(config):
    words = ["--exchange", "allreduce", "local:steps=3", "--links", "open", "--config", config, "--steps", "8", *PAIR]
    command = parse_compare([*words, "--codec.name", "dense", "--train.validate_every", "2", "--redraw"])
    assert command.out == Path("out/exchanges") and [spec.text for spec in command.specs] == ["allreduce", "local:steps=3"]
    assert parse_compare(shlex.split(command.line)[2:]) == command
    assert parse_compare([*words, "--out", "here"]).out == Path("here") and parse_compare(["dense"]).out == Path("out/board")
    _, case = prepare(command)
    learning = case.learning(4)
    assert (learning.seed, learning.train.steps, learning.codec.name, learning.pipeline.mode) == (4, 8, "dense", "workers")
    assert (spec_of(learning.exchange), learning.replicas.count, learning.link.profile) == ("local:steps=3", 2, "open")
    assert learning.pipeline.microbatches == case.timed("dsl_2mbps", 8).pipeline.microbatches == 2
    assert case.name(4) == "local-steps3-2x2-8-4"


@pytest.mark.parametrize("text", ["allreduce", "local:steps=3,replicas.graph=ring", "powersgd:rank=2,train.rate=0.01"])
def test_the_train_line_has_the_settings_of_the_row(config, text):
    (case,) = cases(config, "--exchange", text, "--codec.rank", "4", "--steps", "8")
    for wanted in (case.learning(5), case.over("dsl_2mbps", 5), case.timed("dsl_2mbps", 4)):
        assert parse_train(shlex.split(case.command(wanted))[2:]).config == wanted
        assert wanted.codec.rank == 4


@pytest.mark.parametrize("name", registry.EXCHANGES.names())
def test_every_method_says_when_replicas_meet(config, name):
    (case,) = cases(config, "--exchange", name, "--steps", "40")
    assert case.meeting == (20 if name in ("local", "ist") else 1)


@pytest.mark.parametrize(
    "words, steps, counted",
    [
        (["allreduce"], 8, [2, 3, 4, 5, 6, 7]),
        (["local:steps=2"], 8, [2, 3, 4, 5, 6, 7]),
        (["local:steps=3"], 9, [3, 4, 5, 6, 7, 8]),
        (["local:steps=20"], 40, list(range(20, 40))),
        (["local:steps=50"], 80, list(range(40, 80))),
        (["allreduce", "--codec.drift_every", "4"], 11, [2, 3, 4, 5, 6, 7, 8, 9]),
        (["local:steps=6", "--codec.drift_every", "4"], 24, list(range(12, 24))),
    ],
    ids=str,
)
def test_meetings_are_timed_over_whole_periods(config, words, steps, counted):
    """The last step of a run is a meeting: so a period must end there, or the row would count one too many."""
    (case,) = cases(config, "--exchange", *words, "--steps", "40")
    total, chosen = measure.whole_periods(case, 8)
    assert total == steps and list(range(total))[chosen] == counted


@pytest.mark.parametrize(
    "text, plain, warmup, meeting",
    [("local:steps=4,warmup=8,rate=1.0", "local:steps=4,rate=1.0", 8, 4), ("powersgd:warmup=5", "powersgd", 5, 1), ("ist", "ist", 0, 20)],
)
def test_first_steps_that_travel_whole_are_not_timed(config, text, plain, warmup, meeting):
    """They take the time of the reference; what is measured are the others."""
    (case,) = cases(config, "--exchange", text, "--steps", "40")
    assert case.warmup == warmup and case.learning(0).exchange == options_from_spec("exchange", text)
    assert case.timed("dsl_2mbps", 8).exchange == options_from_spec("exchange", plain)
    assert case.meeting == meeting


def test_notes_tell_what_figures_do_not_show():
    learnt = {"bytes_per_step_exchange": 100.0, "resumed_at": 0}
    timed = {"turns": [{"bytes_per_step": {"exchange": 120.0}}]}
    assert not [*EXCHANGES.notes(SpecRows("local", None, 0, [learnt], {"open": timed}), 20, 100)]
    other = {"turns": [{"bytes_per_step": {"exchange": 410.0}}]}
    found = [*EXCHANGES.notes(SpecRows("local", None, 0, [learnt | {"resumed_at": 7}], {"open": other}), 20, 50)]
    assert ["every 20 steps and is validated every 50" in found[0], "from step 7 on" in found[1], "4.1 times" in found[2]] == [True] * 3
    assert not [*EXCHANGES.notes(SpecRows("local", None, 0, [], {}), 20, 0)]
    (said,) = EXCHANGES.notes(SpecRows("local:warmup=9", None, 9, [learnt], {"open": other}), 20, 100)
    assert "whole in its first 9 steps" in said


def test_words_need_no_torch():
    code = "import sys; from thinwire.cli.compare import parse_compare as parse; parse(['--exchange', 'x']); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True).stdout == "False\n"
