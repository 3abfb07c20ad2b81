"""`thinwire export --push` against a stub of the Hub's client."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from thinwire.cli import main as cli

hub = pytest.importorskip("huggingface_hub")


class Api:
    """Stand in for the Hub's client."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    error: Exception | None = None

    def create_repo(self, name: str, **words: Any) -> str:
        if self.error is not None:
            raise self.error
        self.calls.append((name, words))
        return f"hub/{name}"

    def upload_folder(self, **words: Any) -> None:
        self.calls.append(("upload", words))


@pytest.fixture
def api(monkeypatch) -> type[Api]:
    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(Api, "calls", [])
    return Api


def push(run, out, name: str) -> int:
    return cli.main(["export", str(run), str(out), "--sequences", "0", "--push", name])


def test_the_folder_is_made_and_pushed_to_a_private_repository(api, run, tmp_path, capsys):
    assert push(run, tmp_path / "out", "me/model") == 0
    (name, made), (_, sent) = api.calls
    assert name == "me/model" and made["private"] and sent["repo_id"] == "me/model" and sent["folder_path"] == str(tmp_path / "out")
    assert "pushed to hub/me/model" in capsys.readouterr().out


def test_a_refusal_of_the_hub_leaves_the_folder_and_says_what_to_type(api, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Api, "error", OSError("no route to the Hub"))
    assert push(run, tmp_path / "out", "me/model") != 0
    told = capsys.readouterr().err
    assert "no route to the Hub" in told and f"hf upload me/model {tmp_path / 'out'}" in told and (tmp_path / "out/config.json").is_file()


def test_a_name_that_is_none_is_refused_before_anything_is_made(api, run, tmp_path, capsys):
    assert push(run, tmp_path / "out", "a/b/c") != 0
    assert "--push a/b/c" in capsys.readouterr().err and not api.calls and not (tmp_path / "out").exists()
