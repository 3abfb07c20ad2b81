"""The public names of `import thinwire`: lazy, typed, quiet, and the same results as the verbs."""

from __future__ import annotations

import io
import json
import shlex
import signal
import subprocess
import sys
import threading
import types
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import thinwire
from patience import HANG
from thinwire import Config
from thinwire.cli import main as cli
from thinwire.codecs.base import Codec, CodecOptions
from thinwire.codecs.dense import Dense
from thinwire.config.registry import CODECS
from thinwire.config.sections import RunConfig
from thinwire.run.trainer import Trainer

ROOT = Path(thinwire.__file__).parent
NAMES = {"Config", "train", "evaluate", "generate", "load", "export_model", "compare", "Codec", "Exchange", "register_codec"}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def registered(monkeypatch):
    """Forget what a test registers."""
    monkeypatch.setattr(CODECS, "registered", {})


@pytest.fixture(scope="module")
def run(tmp_path_factory, token_cache) -> Path:
    """Train once, as a notebook would; return the run folder."""
    from runs import write_config

    folder = tmp_path_factory.mktemp("trained")
    thinwire.train(write_config(folder, token_cache), folder / "run")
    return folder / "run"


def test_every_public_name_is_offered_and_none_is_loaded_before_its_time():
    assert set(thinwire.__all__) >= NAMES and set(dir(thinwire)) >= NAMES
    for name in thinwire.__all__:
        assert getattr(thinwire, name) is not None
    code = "import sys, thinwire; print([name for name in ('torch', 'tyro', 'numpy') if name in sys.modules], thinwire.train.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True)
    assert done.stdout == "[] train\n"
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = thinwire.trane


def test_no_public_name_is_a_folder_or_module_of_the_package():
    inside = {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert not inside & {*thinwire.__all__}


def test_type_checkers_see_the_names():
    assert (ROOT / "py.typed").exists()
    text = (ROOT / "__init__.py").read_text()
    assert all(f" import {name} as {name}\n" in text for name in thinwire.__all__ if name != "__version__")


def test_a_config_by_name_by_file_and_by_options(config):
    laptop = Config.load("laptop", {"train.steps": 7, "codec.rank": 8, "seed": 3})
    assert isinstance(laptop, RunConfig) and (laptop.train.steps, laptop.codec.rank, laptop.seed) == (7, 8, 3)
    assert Config.load(config).train.steps == 6 and Config.load() == Config.load("laptop")
    dense = laptop.override({"codec.name": "dense", "pipeline.stages": 2, "exchange.name": "local", "exchange.steps": 4})
    assert (dense.codec.name, dense.pipeline.stages, dense.exchange.steps, laptop.codec.name) == ("dense", 2, 4, "subspace")
    assert Config().codec.name == "subspace" and Config().exchange.name == "allreduce"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"train.stepz": 3}, "there is no setting 'train.stepz'; did you mean train.steps?"),
        ({"steps": 3}, "there is no setting 'steps'; did you mean train.steps?"),
        ({"codec.rnk": 3}, "codec 'subspace' has no option 'rnk'; did you mean rank?"),
        ({"codec.name": "subspac"}, "unknown codec 'subspac'; did you mean subspace?"),
        ({"train.steps": "many"}, "train.steps is 'many'; it must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
    ],
    ids=str,
)
def test_wrong_options_name_what_was_meant(options, message):
    with pytest.raises(ValueError) as raised:
        Config.load("laptop", options)
    assert message in str(raised.value)


def test_a_config_that_does_not_exist():
    with pytest.raises(ValueError, match=r"there is no config 'lapto'; .* did you mean laptop"):
        Config.load("lapto")


def test_train_is_quiet_tells_trackers_and_leaves_the_process_as_it_was(config, tmp_path):
    told, out, err = [], io.StringIO(), io.StringIO()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            result = thinwire.train(
                Config.load(config), tmp_path / "run", trackers=[lambda step, values: told.append((step, values["loss"]))]
            )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert out.getvalue() == err.getvalue() == ""
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert result.finished and result.run == tmp_path / "run" and result.checkpoint == tmp_path / "run/checkpoints/step-000006"
    assert result.summary == json.loads((tmp_path / "run/summary.json").read_text()) and result.summary["steps"] == 6
    assert [(row["step"], row["loss"]) for row in result.metrics] == told and len(told) == 6
    assert "val_loss" in result.metrics[3]
    assert cli.main(["train", "--config", config, "--run", "verb"]) == 0
    assert json.loads(Path("verb/summary.json").read_text())["weights_sha256"] == result.summary["weights_sha256"]


def test_progress_is_shown_if_asked_for(config, capsys):
    thinwire.train(config, "run", progress=True)
    assert "step 6/6" in capsys.readouterr().out


def test_a_run_goes_on_with_its_own_settings_or_changed_ones(config):
    settings = Config.load(config, {"train.steps": 2})
    first = thinwire.train(settings, "run")
    with pytest.raises(ValueError, match="the run folder run exists"):
        thinwire.train(settings, "run")
    with pytest.raises(ValueError, match=r"its model.width is 32, the config gives 64"):
        thinwire.train(settings.override({"model.width": 64}), "run", resume=True)
    more = thinwire.train(settings.override({"train.steps": 4}), "run", resume=True)
    assert (first.summary["steps"], more.summary["steps"], len(more.metrics)) == (2, 4, 4)
    with pytest.raises(ValueError, match="finished at step 4"):
        thinwire.train(None, "run", resume=True)


def test_mistakes_are_value_errors(config, run):
    with pytest.raises(ValueError, match=r"the config is None.*resume=True"):
        thinwire.train(None, "new")
    with pytest.raises(ValueError, match="neither a function"):
        thinwire.train(config, "new", trackers=[3])
    with pytest.raises(ValueError, match="nosuch"):
        thinwire.train(config, "new", trackers=["nosuch"])
    with pytest.raises(ValueError, match="cannot resume"):
        thinwire.train(config, "new", resume=True)
    with pytest.raises(ValueError, match="is not a run folder"):
        thinwire.evaluate("nowhere")
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        thinwire.generate(run, max_new_tokens=0)
    with pytest.raises(ValueError, match="sequences is 0"):
        thinwire.evaluate(run, sequences=0)
    assert not Path("new/checkpoints").exists()


def test_an_error_in_a_tracker_ends_the_training(config):
    def fail(step, values):
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        thinwire.train(config, "run", trackers=[fail])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_returns_what_was_done(config, monkeypatch):
    original = Trainer.step

    def stopping(trainer):
        if trainer.position.step == 2:
            signal.raise_signal(signal.SIGINT)
        return original(trainer)

    monkeypatch.setattr(Trainer, "step", stopping)
    result = thinwire.train(config, "run")
    assert not result.finished and result.summary["steps"] == 3 and result.checkpoint == Path("run/checkpoints/step-000003")


def test_training_in_a_thread_of_a_notebook(config):
    found = []
    worker = threading.Thread(target=lambda: found.append(thinwire.train(config, "run")))
    worker.start()
    worker.join(HANG)
    assert found[0].finished


def test_evaluate_and_generate_say_what_the_verbs_say(run, capsys):
    assert cli.main(["eval", str(run), "--sequences", "8"]) == 0
    assert json.loads(capsys.readouterr().out) == thinwire.evaluate(run, sequences=8)
    assert cli.main(["generate", str(run), "--prompt", "12 plus", "--max-new-tokens", "6"]) == 0
    pieces: list[str] = []
    text = thinwire.generate(run, "12 plus", max_new_tokens=6, on_text=pieces.append)
    assert text + "\n" == capsys.readouterr().out and "".join(pieces) == text
    thinwire.generate(run, "12 plus", max_new_tokens=40)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_a_loaded_model_is_a_plain_module(run):
    model = thinwire.load(run, device="cpu")
    assert isinstance(model, torch.nn.Module) and not model.training
    ids = torch.arange(40).reshape(2, 20) % 300
    logits = model(ids)
    assert logits.shape == (2, 20, 300)
    assert torch.equal(model(ids[:, :5]), logits[:, :5]) or torch.allclose(model(ids[:, :5]), logits[:, :5], atol=1e-5)
    logits.sum().backward()
    assert next(model.parameters()).grad is not None


def test_the_loss_of_a_loaded_model_is_the_evaluated_one(run):
    from thinwire.data.open import open_data
    from thinwire.run.evaluate import validation_batch
    from thinwire.run.saved import read_from, read_settings

    config = read_from(read_settings(run), run)
    windows = validation_batch(open_data(config.data, config.model, config.seed), 8, config.microbatch)
    with torch.no_grad():
        logits = thinwire.load(run)(windows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert float(loss) == pytest.approx(thinwire.evaluate(run, sequences=8)["loss"], rel=1e-5)


def test_export_writes_a_folder(run, capsys):
    assert thinwire.export_model(run, "out") == Path("out") and Path("out/config.json").exists()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    with pytest.raises(ValueError, match="exists"):
        thinwire.export_model(run, "out")


def test_compare_returns_a_row_for_each_spec(config, capsys):
    said: list[str] = []
    settings = Config.load(config, {"train.validate_every": 2})
    rows = thinwire.compare(["dense", "subspace:rank=4"], settings, steps=4, out="board", say=said.append)
    assert capsys.readouterr().out == "" and len(said) == 2
    assert [row["spec"] for row in rows] == ["dense", "subspace:rank=4"] and rows[0]["above_percent"] == 0
    assert rows[1]["bytes_backward"] == 8 and list(rows[1]["curve"]) == [2, 4] and rows[1]["val_loss"] == rows[1]["curve"][4]
    again = thinwire.compare(["dense", "subspace:rank=4"], settings, steps=4, out="board", say=said.append)
    assert again == rows and len(said) == 2
    line = next(line for line in Path("board/screen.md").read_text().splitlines() if line.startswith("    thinwire compare"))
    drawn = Path("board/screen.md").read_text()
    assert cli.main(shlex.split(line)[1:]) == 0 and Path("board/screen.md").read_text() == drawn
    with pytest.raises(ValueError, match="there is no plain `dense` among the specs"):
        thinwire.compare(["subspace"], settings, steps=4, out="board")


@pytest.mark.usefixtures("registered")
def test_a_codec_of_a_notebook_trains_in_process_and_is_refused_in_workers(config, monkeypatch):
    @thinwire.register_codec("mine", text="the stream as it is, once more")
    class Mine(Dense):
        pass

    thinwire.register_codec("mine", Mine)  # a cell that is run again
    settings = Config.load(config, {"codec.name": "mine"})
    result = thinwire.train(settings, "run")
    other = thinwire.train(Config.load(config, {"codec.name": "dense"}), "dense")
    assert result.summary["codec"] == "mine" and result.summary["val_loss"] == other.summary["val_loss"]
    assert thinwire.evaluate("run")["step"] == 6
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # as in a notebook
    with pytest.raises(ValueError, match=r"codec 'mine' is defined in this session alone.*set pipeline.mode to inprocess"):
        thinwire.train(settings.override({"pipeline.mode": "workers"}), "workers")
    with pytest.raises(ValueError, match="there is a codec 'dense' already"):
        thinwire.register_codec("dense", Mine)
    with pytest.raises(ValueError, match=r"is no codec: give a subclass of thinwire\.Codec"):
        thinwire.register_codec("other", dict)


@pytest.mark.usefixtures("registered")
def test_a_codec_of_a_notebook_has_options(config):
    @dataclass(frozen=True, kw_only=True)
    class MineOptions(CodecOptions):
        strength: float = 0.5

    class Mine(Dense):
        Options = MineOptions

    assert issubclass(Mine, Codec)
    thinwire.register_codec("mine", Mine)
    assert Config.load(config, {"codec.name": "mine", "codec.strength": 2}).codec.strength == 2.0


SCRIPT = """
import thinwire
from thinwire import Config
from thinwire.codecs.dense import Dense

@thinwire.register_codec("mine")
class Mine(Dense):
    pass

if __name__ == "__main__":
    heard = []
    config = Config.load({config!r}, {{"pipeline.mode": "workers", "train.steps": 2, "codec.name": "mine"}})
    result = thinwire.train(config, "run", trackers=[lambda step, values: heard.append((step, values))])
    steps = [step for step, values in heard if "loss" in values]
    print(result.finished, steps, len(result.metrics), thinwire.evaluate("run", sequences=4, mode="workers")["step"])
"""
SESSION = """
import thinwire, my_module
thinwire.register_codec("mine", my_module.Mine)
config = thinwire.Config.load({config!r}, {{"pipeline.mode": "workers", "train.steps": 2, "codec.name": "mine"}})
print(thinwire.train(config, "session").finished)
"""


def test_workers_from_a_script_and_with_a_codec_of_a_module(config, tmp_path):
    """A script is imported again by its workers; in a session without one, workers import the module of a registered class."""
    (tmp_path / "script.py").write_text(SCRIPT.format(config=config))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=HANG)
    assert (done.stdout, done.stderr) == ("True [1, 2] 2 2\n", "")
    (tmp_path / "my_module.py").write_text("from thinwire.codecs.dense import Dense\n\nclass Mine(Dense):\n    pass\n")
    done = subprocess.run([sys.executable, "-c", SESSION.format(config=config)], capture_output=True, text=True, timeout=HANG)
    assert (done.stdout, done.stderr) == ("True\n", "")
