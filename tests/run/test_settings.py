"""Settings: TOML, command line, resume, and every refusal with its value, limit and fix."""

import dataclasses
import re
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import HANG
from thinwire.codecs.build import codec_defaults
from thinwire.config import toml as configfile
from thinwire.config.registry import CODECS
from thinwire.config.sections import DataConfig, ModelConfig, RunConfig, TrainConfig
from thinwire.config.toml import flatten, from_toml, load_config, shared_hash, to_toml
from thinwire.run.check import resolve
from thinwire.run.command import parse_train


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def changed(config: RunConfig, **words) -> RunConfig:
    """Replace fields given as section__field=value."""
    for word, value in words.items():
        section, _, name = word.partition("__")
        new = dataclasses.replace(getattr(config, section), **{name: value}) if name else value
        config = dataclasses.replace(config, **{section: new})
    return config


def refusal(argv: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        parse_train(argv)
    return str(caught.value)


def start(run, *argv: str) -> RunConfig:
    """Do what a training run does first: make its folder and write its settings."""
    command = parse_train(["--run", str(run), *argv])
    run.mkdir(parents=True)
    (run / "config.toml").write_text(to_toml(command.config))
    return command.config


# Packaged configs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "small" else pytest.mark.full) for name in configfile.packaged()])
@pytest.mark.parametrize("codec", CODECS.names())
def test_every_packaged_config_passes_with_every_codec(name, codec):
    command = parse_train(["--config", name, "--codec.name", codec])
    assert command.config.codec.name == codec
    assert from_toml(to_toml(command.config)) == command.config


@pytest.mark.parametrize(
    "name, expected",
    [
        ("laptop", {"pipeline.stages": 4, "train.batch": 64, "pipeline.microbatches": 32, "codec.rank": 8, "train.steps": 400}),
        (
            "small",
            {"pipeline.stages": 8, "train.batch": 16, "pipeline.microbatches": 8, "codec.rank": 16, "train.steps": 600, "train.decay": 0.2},
        ),
    ],
)
def test_packaged_configs_are_what_the_documents_say(name, expected):
    words = flatten(load_config(name))
    shape = {"model.width": 256, "model.layers": 8, "model.heads": 4, "model.kv_heads": 2, "model.ffn": 704}
    expected = {**expected, **shape, "model.vocabulary": 4096, "model.context": 128, "codec.name": "subspace", "data.source": "stdlib"}
    assert {word: words[word] for word in expected} == expected
    assert words["train.warmup"] > 0


# Command line ---------------------------------------------------------------------------------------------------------------------------


def test_without_words_the_laptop_config_runs_in_a_named_folder():
    command = parse_train([])
    assert command.config == resolve(load_config("laptop"))
    assert (str(command.run), command.resume) == ("runs/laptop-subspace-0", False)


STABLE = {
    "seed": ("7", 7),
    "device": ("cpu", "cpu"),
    "train.steps": ("12", 12),
    "train.seconds": ("1.5", 1.5),
    "train.dtype": ("bf16", "bf16"),
    "train.clip": ("0.5", 0.5),
    "codec.name": ("subspace", "subspace"),
    "codec.rank": ("4", 4),
    "codec.bits": ("8", 8),
    "codec.dtype": ("fp32", "fp32"),
    "pipeline.stages": ("2", 2),
    "pipeline.split": ("3,5", "3,5"),
    "pipeline.microbatches": ("4", 4),
    "pipeline.mode": ("inprocess", "inprocess"),
    "link.profile": ("open", "open"),
    "memory.budget": ("2GB", "2GB"),
    "data.source": ("/notes/*.txt", "/notes/*.txt"),
}


@pytest.mark.parametrize("form", ["--{} {}", "--{}={}"])
def test_the_stable_words_do_what_they_say(form):
    argv = " ".join(form.format(word, text) for word, (text, _) in STABLE.items()).split(" ")
    command = parse_train([*argv, "--config", "small", "--run", "here/x"])
    words = flatten(command.config)
    assert {word: words[word] for word in STABLE} == {word: value for word, (_, value) in STABLE.items()}
    assert str(command.run) == "here/x"
    untouched = words.keys() - STABLE.keys() - {"model.free_layers"}  # follows from the cut
    assert {word: words[word] for word in untouched} == {word: flatten(resolve(load_config("small")))[word] for word in untouched}


def test_every_field_is_a_word():
    words = flatten(resolve(load_config("laptop")))
    argv = []
    for word, value in words.items():
        if isinstance(value, bool):
            argv.append("--" + (word if value else ".no_".join(word.rsplit(".", 1))))
        else:
            argv += [f"--{word}", str(value)]
    assert parse_train(argv).config == resolve(load_config("laptop"))


def test_hyphens_and_underscores_are_the_same():
    assert parse_train(["--model.kv-heads", "4"]).config.model.kv_heads == 4
    assert parse_train(["--model.kv_heads", "4"]).config.model.kv_heads == 4


def test_the_default_folder_follows_config_codec_and_seed(tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 3\n")
    assert str(parse_train(["--config", "mine.toml", "--codec.name", "dense", "--seed", "5"]).run) == "runs/mine-dense-5"


def test_a_file_needs_only_what_differs(tmp_path):
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 3\nrate = 1\n")
    config = parse_train(["--config", "mine.toml"]).config
    assert config == resolve(changed(RunConfig(codec=codec_defaults("subspace")), train__steps=3, train__rate=1.0))
    assert type(config.train.rate) is float


def test_another_codec_drops_options_it_does_not_have_and_keeps_the_rest(tmp_path):
    (tmp_path / "mine.toml").write_text('[codec]\nname = "subspace"\nrank = 8\ndtype = "fp32"\n')
    options = parse_train(["--config", "mine.toml", "--codec.name", "dense"]).config.codec
    assert options == codec_defaults("dense", dtype="fp32")


def test_another_codec_starts_from_its_own_defaults():
    assert parse_train(["--codec.name", "quantize"]).config.codec == codec_defaults("quantize")
    assert codec_defaults("quantize").bits == 8


def test_help_lists_the_chosen_codecs_options(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_train(["--codec.name", "subspace", "--help"])
    assert caught.value.code == 0
    subspace = capsys.readouterr().out
    assert "--codec.rank" in subspace
    assert "Coordinates per token" in subspace
    with pytest.raises(SystemExit):
        parse_train(["--codec.name=dense", "-h"])
    dense = capsys.readouterr().out
    assert "--codec.dtype" in dense
    assert "--codec.rank" not in dense


def test_help_works_beside_resume_and_an_existing_folder(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        parse_train(["--resume", "--run", str(tmp_path), "--help"])
    assert caught.value.code == 0


def test_settings_import_no_torch():
    code = "import sys, thinwire.cluster.join_command; assert not {'torch', 'tyro', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], timeout=HANG, check=True)


# Refused words and files ----------------------------------------------------------------------------------------------------------------

WORDS_REFUSED = [
    (["--train.step", "3"], ["unknown option --train.step;", "did you mean --train.steps?"]),
    (["--stages", "3"], ["unknown option --stages;", "--pipeline.stages"]),
    (["--resum"], ["--resum;", "did you mean --resume?"]),
    (["--codec.name", "dense", "--codec.rank", "4"], ["'dense' has no option 'rank'", "it has name, dtype, bits"]),
    (["--codec.rnk", "4"], ["'subspace' has no option 'rnk'", "rank"]),
    (["--codec.name", "subspce"], ["unknown codec 'subspce'", "dense", "subspace"]),
    (["--config", "latop"], ["no config 'latop'", "did you mean laptop?", ".toml"]),
    (["--config", "missing.toml"], ["cannot read missing.toml", "No such file", "laptop, llama_1b"]),
]


@pytest.mark.parametrize("argv, parts", WORDS_REFUSED, ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "")
def test_unknown_words_are_refused_with_what_was_meant(argv, parts):
    message = refusal(argv)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("argv", [["--train.steps", "many"], ["--train.dtype", "fp8"], ["stray"], ["--config"]])
def test_values_of_the_wrong_kind_exit_2_and_name_the_word(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_train(argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["abacus", "cuda:first"])
def test_a_device_that_torch_does_not_know_is_refused(name):
    assert f"device is {name!r}; choose auto, cpu, cuda, cuda:1, xpu, mps" in refusal(["--device", name])


FILES_REFUSED = [
    ("[train\n", ["mine.toml is not valid TOML", "line 1"]),
    ("[trian]\n", ["unknown entry 'trian'", "did you mean train?"]),
    ("train = 3\n", ["train is 3", "[train]"]),
    ("codec = 3\n", ["codec is 3", "[codec]"]),
    ("[train]\nstep = 3\n", ["[train] has no option 'step'", "did you mean steps?"]),
    ("[train]\nsteps = 3.5\n", ["train.steps is 3.5", "a whole number"]),
    ("[train]\nsteps = true\n", ["train.steps is True", "a whole number"]),
    ("[train]\nrate = '3'\n", ["train.rate is '3'", "a number"]),
    ("[train]\nseconds = '3'\n", ["train.seconds is '3'", "a number or left out"]),
    ("[model]\ntied_head = 1\n", ["model.tied_head is 1", "true or false"]),
    ("[codec]\nname = 3\n", ["codec.name is 3", "text"]),
    ("[codec]\nname = 'nosuch'\n", ["unknown codec 'nosuch'", "subspace"]),
    (
        "[codec]\nname = 'dense'\nrank = 3\n",
        ["codec 'dense' has no option 'rank'", "bits, boundary_rates, dead_zone, dither, dtype, entropy, name"],
    ),
    ("[codec]\nrank = 'three'\n", ["codec.rank is 'three'", "a whole number"]),
]


@pytest.mark.parametrize("text, parts", FILES_REFUSED, ids=[text for text, _ in FILES_REFUSED])
def test_bad_files_are_refused_with_file_field_and_fix(text, parts, tmp_path):
    (tmp_path / "mine.toml").write_text(text)
    message = refusal(["--config", "mine.toml"])
    for part in parts:
        assert part in message
    assert "mine.toml" in message or "codec" in message


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    assert "mine.toml is not UTF-8" in refusal(["--config", "mine.toml"])


# Refused values -------------------------------------------------------------------------------------------------------------------------

VALUES_REFUSED = [
    ("--pipeline.stages 9", ["pipeline.stages is 9", "8 layers"]),
    ("--pipeline.split 2,2,3,2", ["2,2,3,2", "9 layers", "has 8"]),
    ("--pipeline.split 4,4", ["4,4", "2 stages", "is 4"]),
    ("--pipeline.split 2,2,4,0", ["2,2,4,0", "at least one"]),
    ("--pipeline.split 2;2;2;2", ["2;2;2;2", "commas"]),
    ("--pipeline.microbatches 5", ["pipeline.microbatches is 5", "train.batch 64", "choose 4 or 8"]),
    ("--pipeline.microbatches 128", ["pipeline.microbatches is 128", "train.batch 64", "choose 64"]),
    ("--model.heads 6 --model.kv_heads 6", ["model.heads is 6", "model.width 256", "choose 4 or 8"]),
    ("--model.heads 256", ["256 / 256 = 1 is odd", "even"]),
    ("--model.kv_heads 3", ["model.kv_heads is 3", "model.heads 4", "choose 2 or 4"]),
    ("--model.free_layers 9", ["model.free_layers is 9", "8 layers", "0 to 8"]),
    ("--model.free_layers -1", ["model.free_layers is -1", "at least 0"]),
    ("--model.dropout 1", ["model.dropout is 1.0", "below 1"]),
    ("--model.output_dropout -0.1", ["model.output_dropout is -0.1", "at least 0"]),
    ("--train.decay 1.5", ["train.decay is 1.5", "between 0 and 1"]),
    ("--train.seconds 0", ["train.seconds is 0.0", "above 0"]),
    ("--train.rate nan", ["train.rate is nan", "above 0"]),
    ("--train.rate inf", ["train.rate is inf", "above 0"]),
    ("--train.clip -1", ["train.clip is -1.0", "at least 0"]),
    ("--seed -1", ["seed is -1", "between 0 and"]),
    ("--seed 9223372036854775808", ["seed is 9223372036854775808", "9223372036854775807"]),
    ("--codec.name dense --model.tied_head", ["model.tied_head", "separate workers cannot", "inprocess"]),
    ("--link.profile dls_2mbps", ["unknown link profile 'dls_2mbps'", "did you mean dsl_2mbps"]),
    ("--pipeline.mode inprocess --link.profile dsl_2mbps", ["link.profile is dsl_2mbps", "no link", "--pipeline.mode workers"]),
    ("--codec.rank 257", ["codec.rank is 257", "256"]),
    ("--codec.rank 0", ["codec.rank is 0", "1 to"]),
    ("--codec.bits 5", ["codec.bits is 5", "8, 4, 3, 2 or 1"]),
    ("--model.tied_head", ["model.tied_head", "subspace", "dense"]),
]
WHOLE = (
    "model.vocabulary model.width model.layers model.heads model.kv_heads model.ffn model.context data.max_tokens train.steps train.batch"
)
WHOLE += " train.validation_sequences pipeline.stages pipeline.microbatches"
VALUES_REFUSED += [(f"--{word} 0", [f"{word} is 0", f"--{word}", "at least 1"]) for word in WHOLE.split()]


@pytest.mark.parametrize("words, parts", VALUES_REFUSED, ids=[words for words, _ in VALUES_REFUSED])
def test_values_that_cannot_work_are_refused_with_value_and_limit(words, parts, tmp_path):
    message = refusal(words.split())
    for part in parts:
        assert part in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    ["--model.dropout 0.5", "--model.free_layers 0", "--train.clip 0", "--train.decay 1", "--pipeline.stages 8", "--codec.rank 256"],
)
def test_values_at_the_limit_pass(words):
    parse_train(words.split())


def test_every_number_has_a_limit():
    from thinwire.config.limits import LIMITS

    limited = {word for *_, words in LIMITS for word in words.split()}
    numbers = {
        word for word, value in flatten(load_config("laptop")).items() if type(value) in (int, float) and not word.startswith("codec.")
    }
    assert numbers <= limited
    assert limited <= flatten(load_config("laptop")).keys()


# Run folder and resume ------------------------------------------------------------------------------------------------------------------


USED = ("a.txt", "checkpoints/step-000001/stage-0.json", "config.toml copies/step-000001/stage-0.json", "config.toml summary.json")


@pytest.mark.parametrize("names", USED)
def test_a_run_folder_with_something_in_it_is_refused(tmp_path, names):
    for name in names.split():
        (tmp_path / "r" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / name).touch()
    message = refusal(["--run", "r"])
    for part in ("run folder r exists", "--run DIR", "--resume"):
        assert part in message


def test_a_folder_without_a_checkpoint_can_be_used_again(tmp_path):
    (tmp_path / "r").mkdir()
    assert not parse_train(["--run", "r"]).resume
    start(tmp_path / "again", "--codec.rank", "4")
    (tmp_path / "again/checkpoints/step-000010").mkdir(parents=True)
    (tmp_path / "again/checkpoints/step-000010/stage-0.safetensors").touch()  # killed before its manifest was written
    assert parse_train(["--run", "again"]).config.codec.rank == 8
    (tmp_path / "again/config.toml").rename(tmp_path / "again/.config.toml.1.tmp")  # killed before its settings were written
    assert parse_train(["--run", "again", "--resume"]).resume and not parse_train(["--run", "again"]).resume


@pytest.mark.parametrize("make", [False, True], ids=["no folder", "no config in it"])
def test_resume_of_nothing_is_refused(tmp_path, make):
    if make:
        (tmp_path / "r").mkdir()
    message = refusal(["--run", "r", "--resume"])
    for part in ("cannot resume", "r/config.toml", "--run"):
        assert part in message


def test_resume_takes_the_runs_own_settings(tmp_path):
    config = start(tmp_path / "r", "--config", "small", "--codec.name", "quantize", "--seed", "3")
    command = parse_train(["--run", "r", "--resume"])
    assert (command.config, str(command.run), command.resume) == (config, "r", True)


def test_the_same_command_with_resume_goes_on(tmp_path):
    argv = ["--config", "small", "--codec.name", "dense", "--seed", "3", "--train.steps", "20"]
    config = start(tmp_path / "runs" / "small-dense-3", *argv)
    command = parse_train([*argv, "--resume"])
    assert (command.config, str(command.run)) == (config, "runs/small-dense-3")


def test_resume_without_any_word_finds_the_default_folder(tmp_path):
    config = start(tmp_path / "runs" / "laptop-subspace-0", "--codec.rank", "4")
    assert parse_train(["--resume"]).config == config


LOCAL_WORDS = {
    "device": "cpu",
    "train.seconds": "9.0",
    "train.stuck_seconds": "90.0",
    "train.threads": "2",
    "pipeline.mode": "inprocess",
    "pipeline.engine": "own",
    "link.profile": "dsl_2mbps",
    "link.pace_mbps": "3.5",
    "link.ping_seconds": "0.5",
    "link.silent_seconds": "7.5",
    "link.standby_seconds": "7.5",
    "link.reconnect_seconds": "90.0",
    "memory.budget": "500MB",
    "memory.folder": "elsewhere",
    "data.cache": "elsewhere",
    "data.source": "/elsewhere/*.txt",
    "data.tokenizer": "/elsewhere/tokenizer.json",
}
ADJUSTABLE_WORDS = {
    "train.steps": "300",
    "train.rate": "0.5",
    "train.muon_rate": "0.5",
    "train.warmup": "3",
    "train.decay": "0.5",
    "train.schedule": "cosine",
    "train.floor": "0.5",
    "train.embedding_rate": "0.5",
    "train.head_rate": "0.5",
    "train.vector_rate": "0.5",
    "pipeline.schedule": "gpipe",
    "data.everywhere": "true",
}
FREE_WORDS = LOCAL_WORDS | ADJUSTABLE_WORDS


@pytest.mark.parametrize("named", [pytest.param([], marks=pytest.mark.full), ["--config", "laptop"]], ids=["", "config named"])
@pytest.mark.parametrize("word", FREE_WORDS)
def test_resume_may_change_local_things_and_how_to_go_on(tmp_path, word, named):
    config = start(tmp_path / "r")
    resumed = parse_train(["--run", "r", "--resume", f"--{word}", FREE_WORDS[word], *named]).config
    differing = {key: str(value) for key, value in flatten(resumed).items() if value != flatten(config)[key]}
    assert {key: value.lower() for key, value in differing.items()} == {word: FREE_WORDS[word].lower()}


def test_paths_of_data_are_kept_from_the_root_on(tmp_path, monkeypatch):
    """Whoever resumes in another current folder finds them."""
    start(tmp_path / "r", "--data.source", "notes/*.txt", "--data.tokenizer", "tokenizer.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    data = parse_train(["--run", "../r", "--resume"]).config.data
    assert (data.source, data.tokenizer) == (str(tmp_path / "notes/*.txt"), str(tmp_path / "tokenizer.json"))
    data = parse_train(["--data.source", "hf:some/texts", "--data.tokenizer", "hf:some/model"]).config.data
    assert (data.source, data.tokenizer) == ("hf:some/texts", "hf:some/model")


def test_a_fork_has_the_settings_of_its_run(tmp_path):
    config = start(tmp_path / "r", "--config", "small", "--seed", "3")
    command = parse_train(["--from", "r", "--run", "new", "--train.rate", "0.5"])
    assert (str(command.fork), str(command.run), command.resume) == ("r", "new", True)
    assert command.config == changed(config, train__rate=0.5)
    assert "--run NEW" in refusal(["--from", "r"]) and "--run NEW" in refusal(["--from", "r", "--run", "new", "--resume"])
    assert "nothing/config.toml does not exist" in refusal(["--from", "nothing", "--run", "new"])
    assert "seed is 3" in refusal(["--from", "r", "--run", "new", "--seed", "4"])
    (tmp_path / "new/checkpoints/step-000001").mkdir(parents=True)
    (tmp_path / "new/checkpoints/step-000001/stage-0.json").touch()
    assert "run folder new exists" in refusal(["--from", "r", "--run", "new"])


def test_a_named_config_does_not_undo_local_things_of_the_run(tmp_path):
    config = start(tmp_path / "r", "--train.threads", "2", "--train.steps", "900")
    assert parse_train(["--run", "r", "--resume", "--config", "laptop"]).config == config


@pytest.mark.parametrize("word", ["--resume", "--from"])
def test_a_named_file_says_how_to_go_on(tmp_path, capsys, word):
    """What a resume may change counts in the file too, but less than the words beside it."""
    (tmp_path / "mine.toml").write_text('[train]\nrate = 0.002\nsteps = 40\n[pipeline]\nschedule = "1f1b"\n')
    config = start(tmp_path / "r", "--config", "mine.toml", "--train.threads", "2")
    (tmp_path / "mine.toml").write_text('[train]\nrate = 0.001\nsteps = 80\n[pipeline]\nschedule = "gpipe"\n')
    place = ["--run", "r", "--resume"] if word == "--resume" else ["--run", "new", "--from", "r"]
    command = parse_train(["--config", "mine.toml", *place, "--train.steps", "90"])
    assert command.config == changed(config, train__rate=0.001, train__steps=90, pipeline__schedule="gpipe")
    said = capsys.readouterr().err
    assert "note: train.rate is 0.001 from now on, by mine.toml; it was 0.002" in said and "train.steps" not in said
    (tmp_path / "mine.toml").write_text("seed = 1\n")
    assert "seed is 0" in refusal(["--config", "mine.toml", *place])


@pytest.mark.parametrize(
    "words, parts",
    [
        ("--seed 1", ["seed is 0", "the command line gives 1"]),
        ("--train.clip 0.5", ["train.clip is 1.0", "gives 0.5"]),
        ("--codec.rank 4", ["codec.rank is 8", "gives 4"]),
        ("--codec.name dense", ["codec.name is subspace", "gives dense"]),
        ("--config small", ["train.batch is 64", "--config small", "give 16;"]),
        ("--config laptop --codec.rank 16", ["codec.rank is 8", "give 16"]),
    ],
)
def test_resume_refuses_other_changes_with_field_and_both_values(tmp_path, words, parts):
    start(tmp_path / "r")
    message = refusal(["--run", "r", "--resume", *words.split()])
    for part in [*parts, "r"]:
        assert part in message


@pytest.mark.parametrize("named", [[], ["--config", "laptop"]], ids=["", "config named"])
def test_resume_may_change_the_shape(tmp_path, named):
    config = start(tmp_path / "r", "--pipeline.split", "3,2,1,2")
    assert config.model.free_layers == 2
    resumed = parse_train(["--run", "r", "--resume", "--pipeline.stages", "2", "--pipeline.microbatches", "8", *named]).config
    assert resumed == changed(config, pipeline__stages=2, pipeline__split=None, pipeline__microbatches=8)
    resumed = parse_train(["--run", "r", "--resume", "--pipeline.split", "1,2,3,2", *named]).config
    assert resumed == changed(config, pipeline__split="1,2,3,2")
    assert parse_train(["--run", "r", "--resume", *named]).config == config
    message = refusal(["--run", "r", "--resume", "--pipeline.split", "2,2,3,1", *named])
    assert "model.free_layers is 2 but the last stage has 1 layer" in message and "--pipeline.split 2,2,2,2" in message


def test_a_config_must_be_named_with_the_words_the_run_was_started_with(tmp_path):
    start(tmp_path / "r", "--codec.rank", "16")
    assert re.search(
        r"codec.rank is 16, --config laptop .* give 8; .*another --run", refusal(["--run", "r", "--resume", "--config", "laptop"])
    )
    parse_train(["--run", "r", "--resume", "--config", "laptop", "--codec.rank", "16"])


# Text and hash --------------------------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(allow_nan=False, width=64)


@given(
    cache=st.text(st.characters(exclude_categories=["Cs"])),
    rate=NUMBERS,
    seconds=st.none() | NUMBERS,
    steps=st.integers(-(2**63), 2**63 - 1),
    bias=st.booleans(),
    codec=st.sampled_from(["dense", "subspace", "quantize"]),
    split=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
)
def test_toml_round_trip_is_exact(cache, rate, seconds, steps, bias, codec, split):
    config = RunConfig(
        data=DataConfig(cache=cache),
        model=ModelConfig(output_bias=bias),
        train=TrainConfig(rate=rate, seconds=seconds, steps=steps),
        codec=codec_defaults(codec),
    )
    config = changed(config, pipeline__split=split)
    assert from_toml(to_toml(config)) == config


def test_the_written_file_is_complete_toml():
    config = load_config("small")
    table = tomllib.loads(to_toml(config))
    assert table["codec"]["rank"] == 16
    unset = {word for word, value in flatten(config).items() if value is None}
    written = {
        name if not isinstance(value, dict) else f"{name}.{key}"
        for name, value in table.items()
        for key in (value if isinstance(value, dict) else [""])
    }
    assert written == flatten(config).keys() - unset


def test_an_unset_value_with_another_default_cannot_be_written():
    config = changed(load_config("small"), codec=codec_defaults("quantize", bits=None))
    with pytest.raises(ValueError, match=r"codec.bits is unset.*default is 8"):
        to_toml(config)


def different(value):
    """Return another value of the same kind."""
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else (value or 0) + 1


def test_the_hash_covers_every_field_but_the_local_ones():
    config = load_config("laptop")
    assert shared_hash(config) == shared_hash(load_config("laptop"))
    assert re.fullmatch("[0-9a-f]{64}", shared_hash(config))
    for word, value in flatten(config).items():
        other = changed(config, **{word.replace(".", "__"): different(value)})
        assert (shared_hash(other) == shared_hash(config)) == (word in configfile.LOCAL), word


def test_local_fields_are_the_promised_ones():
    assert LOCAL_WORDS.keys() == configfile.LOCAL and ADJUSTABLE_WORDS.keys() == configfile.ADJUSTABLE


def test_a_codec_that_no_boundary_would_use_is_refused():
    words = ["--config", "small", "--codec.name", "topk", "--codec.from_layer"]
    assert "codec.from_layer is 8, the last boundary is before layer 7" in refusal([*words, "8"])
    assert parse_train([*words, "7"]).config.codec.from_layer == 7
