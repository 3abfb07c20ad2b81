"""Whole comparisons of a tiny model: rows, table, plots; what is there is not made again."""

from __future__ import annotations

import builtins
import json
import shutil
import signal
from pathlib import Path

import pytest

from runs import unhurried
from thinwire import checkpoint
from thinwire.board import comparison, measure
from thinwire.cli import main as cli
from thinwire.config.sections import PipelineConfig, RunConfig
from thinwire.run.trainer import Trainer
from thinwire.util.lock import locked

WORDS = ("--steps", "6", "--train.validate_every", "2", "--speed-steps", "4")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "LOOK_SECONDS", 0.05)


def compare(config: str, *words: str, code: int = 0) -> None:
    with unhurried():
        assert cli.main(["compare", *words, "--config", config, *WORDS]) == code


def files(folder: str) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def read(path: str) -> dict:
    return json.loads(Path(path).read_text())


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the plots out where they are not the question: they take most of the time."""
    monkeypatch.setattr(comparison, "draw_plots", lambda *_: [])


@pytest.fixture
def forbid(monkeypatch):
    """Return what makes training and measuring impossible."""

    def forbidden(*_, **__):
        raise AssertionError("this must not train")

    def apply() -> None:
        for name in ("train_here", "launch"):
            monkeypatch.setattr(measure, name, forbidden)

    return apply


def test_a_whole_comparison_and_again(config, tmp_path, capsys, forbid):
    (tmp_path / "specs.txt").write_text("dense\n# Equal width\nsubspace:rank=6\n")
    words = ("@specs.txt", "--links", "open", "20mbps_5ms", "--seeds", "0", "1")
    compare(config, *words)
    printed = capsys.readouterr().out
    assert "[4/4] learn subspace-rank6 seed 1: validation loss" in printed and "[4/4] speed subspace-rank6 on 20mbps_5ms: " in printed
    assert max(map(len, printed.splitlines())) <= 120
    row = read("out/board/learn/subspace-rank6-6-1.json")
    assert row["spec"] == "subspace:rank=6" and row["seed"] == 1 and row["steps"] == 6 and row["tokens"] == 6 * 4 * 16
    assert list(row["curve"]) == ["2", "4", "6"] and row["curve"]["6"] == row["val_loss"]
    assert row["bytes_per_token_forward"] == 12 + 2 * 17 / 16 and row["bytes_per_token_backward"] == 12
    assert row["settings"]["train.steps"] == 6 and "--codec.name subspace" in row["command"] and row["torch"] and row["thinwire"]
    timed = read("out/board/speed/dense-20mbps_5ms.json")
    assert timed["tokens_per_second"] == pytest.approx(64 / timed["seconds_per_step"]) and timed["turns"][0]["steps"] == 4
    assert len(timed["peak_rss_bytes"]) == 2 and min(timed["peak_rss_bytes"]) > 0 and timed["turns"][0]["socket_bytes"] > 0
    assert timed["turns"][0]["load_average"] is not None
    table = Path("out/board/screen.md").read_text()
    assert "| **Equal width** |" in table and "| subspace:rank=6 |" in table and "seeds 0, 1" in table and " ± " in table
    assert {path.name for path in Path("out/board/plots/screen").iterdir()} == {
        f"{name}.{ending}" for name in ("1-steps", "2-bytes", "3-open", "4-20mbps_5ms") for ending in ("png", "svg")
    }
    page = Path("out/board.md").read_text()
    assert page.startswith("# Board\n") and "](board/plots/screen/4-20mbps_5ms.png)" in page
    assert all((tmp_path / "out" / part.split(")")[0]).exists() for part in page.split("](")[1:])
    before = files("out")
    forbid()
    for more in ((), ("--redraw",)):
        compare(config, *words, *more)
        after = files("out")
        assert {path: data for path, (data, _) in after.items()} == {path: data for path, (data, _) in before.items()}
        assert all(after[path] == before[path] for path in before if path.endswith(".json"))


def test_redraw_of_missing_rows_trains_nothing(config, forbid):
    forbid()
    compare(config, "dense", "subspace", "--links", "open", "--redraw")
    table = Path("out/board/screen.md").read_text()
    assert "| dense | - | - | - |" in table and "dense has no learning row" in table
    assert not Path("out/board/learn").exists() and not Path("out/board/runs").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_folder_gives_the_row(config, forbid):
    compare(config, "dense", "--links")
    path = Path("out/board/learn/dense-6-0.json")
    before = path.read_bytes()
    path.unlink()
    forbid()
    compare(config, "dense", "--links")
    assert path.read_bytes() == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("lost", ["summary", "last checkpoint", "all checkpoints"])
@pytest.mark.parametrize("text", ["subspace:rank=6", "quantize:bits=4,warmup=3"])
def test_an_interrupted_row_goes_on_and_is_the_same(config, monkeypatch, text, lost):
    """A warm-up changes the bytes of the first steps: a resumed run must count those of before too."""
    words = (text, "--links", "--target", "4")
    compare(config, *words)
    (path,) = Path("out/board/learn").iterdir()
    folder, before = Path("out/board/runs") / path.stem, path.read_bytes()
    path.unlink()
    (folder / "summary.json").unlink()
    if lost != "summary":
        shutil.rmtree(folder / "checkpoints" / "step-000006")
    if lost == "all checkpoints":
        shutil.rmtree(folder / "checkpoints")
    loaded = []
    original = checkpoint.load_stages
    monkeypatch.setattr(checkpoint, "load_stages", lambda *arguments: loaded.append(arguments[0].name) or original(*arguments))
    compare(config, *words)
    assert loaded == ([] if lost == "all checkpoints" else ["step-000004"])
    assert path.read_bytes() == before


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("number", "point", "step"), [(signal.SIGINT, "step", 3), (signal.SIGTERM, "step", 3), (signal.SIGTERM, "validate", 6)]
)
def test_a_stop_ends_the_comparison_and_the_same_command_goes_on(config, monkeypatch, number, point, step):
    original, asked = getattr(Trainer, point), []

    def stopping(trainer):
        if not asked and trainer.position.step == step:
            asked.append(True)
            signal.raise_signal(number)
        return original(trainer)

    monkeypatch.setattr(Trainer, point, stopping)
    compare(config, "dense", "--links", code=130)
    assert not Path("out/board/learn/dense-6-0.json").exists() and not Path("out/board/screen.md").exists()
    compare(config, "dense", "--links")
    resumed = read("out/board/learn/dense-6-0.json")
    shutil.rmtree("out")
    compare(config, "dense", "--links")
    assert read("out/board/learn/dense-6-0.json") == resumed


@pytest.mark.parametrize("mode", ["inprocess", "workers"])
def test_a_run_that_another_process_trains_is_left_alone(mode, tmp_path, forbid):
    forbid()
    config, run = RunConfig(pipeline=PipelineConfig(mode=mode)), tmp_path / "run"
    last = run / f"checkpoints/step-{config.train.steps:06d}"
    last.mkdir(parents=True)
    with locked(run), pytest.raises(ValueError, match=r"is in use by process .*choose another with --out DIR"):
        measure.train_row(config, run)
    assert last.exists()


@pytest.mark.usefixtures("undrawn")
def test_rows_and_runs_of_other_settings_are_refused(config, capsys, forbid):
    compare(config, "dense", "--links")
    forbid()
    compare(config, "dense", "--links", "--train.rate", "0.1", code=2)
    error = capsys.readouterr().err
    assert "dense-6-0.json was made with train.rate = 0.003, this comparison has 0.1; give --out another folder" in error
    Path("out/board/learn/dense-6-0.json").unlink()
    compare(config, "dense", "--links", "--train.rate", "0.1", code=2)
    error = capsys.readouterr().err
    assert "out/board/runs/dense-6-0 was made with train.rate = 0.003, this comparison has 0.1; remove that run" in error


@pytest.mark.usefixtures("undrawn")
def test_another_corpus_has_rows_runs_and_a_board_of_its_own(config, tmp_path, capsys, forbid):
    """The same command with another text, in the same folder: nothing is refused, mixed or overwritten."""
    compare(config, "dense", "--links", "open")
    first = files("out")
    (tmp_path / "my book.txt").write_text("".join(f"In the year {number} nothing much happened.\n" for number in range(800)))
    words = ("dense", "--links", "open", "--data.source", str(tmp_path / "my book.txt"))
    compare(config, *words)
    assert "out/board holds rows of another corpus" in capsys.readouterr().out
    assert {path: data for path, data in files("out").items() if path in first and path != "out/board.md"} == {
        path: data for path, data in first.items() if path != "out/board.md"
    }
    (learnt,), (timed,), (board,) = (list(Path("out/board").glob(f"{place}*my_book-*")) for place in ("learn/", "speed/", "screen-"))
    assert read(str(learnt))["settings"]["data.source"] == words[-1] == read(str(timed))["settings"]["data.source"]
    assert {path.name for path in Path("out/board/runs").iterdir()} == {"dense-6-0", learnt.stem}
    assert all(f"## {name}\n" in Path("out/board.md").read_text() for name in ("screen", board.stem))
    shutil.move("out/board/learn/dense-6-0.json", tmp_path)  # what has its own names keeps them
    forbid()
    compare(config, *words)


@pytest.mark.usefixtures("undrawn")
def test_who_reads_the_text_is_no_other_corpus_and_rows_of_earlier_versions_say_nothing_of_it(config, capsys):
    compare(config, "dense", "--links")
    row = read("out/board/learn/dense-6-0.json")
    del row["settings"]["data.everywhere"]
    Path("out/board/learn/dense-6-0.json").write_text(json.dumps(row))
    compare(config, "dense", "quantize:bits=8,data.everywhere=true", "--links")
    assert "another corpus" not in capsys.readouterr().out
    assert {path.name for path in Path("out/board/learn").iterdir()} == {"dense-6-0.json", "quantize-bits8-data.everywheretrue-6-0.json"}


@pytest.mark.usefixtures("undrawn")
def test_folders_share_nothing(config, tmp_path):
    """Other settings need another --out, and nothing but that."""
    compare(config, "dense", "--links")
    compare(config, "dense", "--links", "--train.rate", "0.1", "--out", "elsewhere")
    assert read("elsewhere/learn/dense-6-0.json")["settings"]["train.rate"] == 0.1
    assert {path.name for path in tmp_path.iterdir()} >= {"out", "elsewhere"} and not Path("runs").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_row_that_fails_leaves_the_others_their_turn(config, capsys, monkeypatch):
    original = Trainer.step

    def diverging(trainer):
        if trainer.config.codec.name == "subspace":
            raise ValueError("training has diverged")
        return original(trainer)

    monkeypatch.setattr(Trainer, "step", diverging)
    compare(config, "subspace", "dense", "--links", code=2)
    captured = capsys.readouterr()
    assert "[0/2] learn subspace seed 0: failed: training has diverged" in captured.out
    assert "[1/2] learn dense seed 0: validation loss" in captured.out
    assert "1 rows are missing; learn subspace seed 0: training has diverged; leave that spec out" in captured.err
    assert "| subspace | - |" in Path("out/board/screen.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_row_older_than_a_setting_is_kept_and_a_torn_one_refused(config, capsys, forbid):
    compare(config, "dense", "--links")
    path = Path("out/board/learn/dense-6-0.json")
    row = read(str(path))
    del row["settings"]["model.output_bias"]
    path.write_text(json.dumps(row))
    forbid()
    compare(config, "dense", "--links")
    compare(config, "dense", "--links", "--model.output_bias", code=2)
    assert "made with model.output_bias = False, this comparison has True" in capsys.readouterr().err
    path.write_text("{")
    compare(config, "dense", "--links", code=2)
    assert "dense-6-0.json is not a row of a comparison" in capsys.readouterr().err


def test_boards_share_one_page_in_the_order_of_their_numbers(config):
    for name in ("10-late", "9-early"):
        compare(config, "dense", "--links", "--name", name)
    Path("out/board/discussion.md").write_text("What we see.\n")
    compare(config, "dense", "--links", "--name", "other")
    page = Path("out/board.md").read_text()
    wanted = [
        "# Board",
        "What we see.",
        "## 9-early",
        "plots/9-early/1-steps.png",
        "## 10-late",
        "## other",
        "plots/other/1-steps.png",
    ]
    assert sorted(wanted, key=page.index) == wanted
    assert page.count("What we see.") == 1


def test_without_matplotlib_there_is_still_a_table(config, capsys, monkeypatch):
    original = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    compare(config, "dense", "--links")
    assert (
        "no plots: matplotlib is not installed; in the checkout: pip install -c constraints.txt -e '.[plot]', then: thinwire compare dense"
        in capsys.readouterr().out
    )
    assert Path("out/board/screen.md").exists() and not Path("out/board/plots").exists()


@pytest.mark.usefixtures("undrawn")
def test_end_to_end_and_repeats(config, forbid):
    words = ("dense", "--links", "20mbps_5ms", "--end-to-end", "--repeats", "2")
    compare(config, *words)
    row = read("out/board/end_to_end/dense-6-0-20mbps_5ms.json")
    alone = read("out/board/learn/dense-6-0.json")
    assert list(row["curve"]) == list(row["seconds"]) == ["2", "4", "6"]
    assert row["curve"] == pytest.approx(alone["curve"], rel=1e-6)
    assert 0 < row["seconds"]["2"] < row["seconds"]["4"] < row["seconds"]["6"]
    timed = read("out/board/speed/dense-20mbps_5ms.json")
    assert len(timed["turns"]) == 2
    assert timed["seconds_per_step"] == pytest.approx(sum(turn["seconds_per_step"] for turn in timed["turns"]) / 2)
    line = Path("out/board/screen.md").read_text().splitlines()[-1]
    assert line.startswith("| dense | 20mbps_5ms | ")
    estimated, measured, ratio = (float(cell) for cell in line.split("|")[3:6])
    assert measured == pytest.approx((row["seconds"]["2"] + row["seconds"]["4"]) / 2, abs=0.01) and estimated > 0
    assert ratio == pytest.approx(measured / estimated, rel=0.1)
    before = files("out")
    forbid()
    compare(config, *words)
    assert {path: data for path, (data, _) in files("out").items()} == {path: data for path, (data, _) in before.items()}
