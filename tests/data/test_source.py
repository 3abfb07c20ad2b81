"""Finding text, splitting it, and refusing what cannot be read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from thinwire.data.source import FileSource, Split, find_files, in_validation, open_stdlib, open_text, read_pieces


def open_pattern(pattern: str | Path) -> FileSource:
    return open_text(str(pattern), find_files(str(pattern)))


def text_of(source: FileSource, split: Split) -> str:
    return "".join(text for text, _ in source.pieces(split))


def write_many(folder: Path, count: int = 60) -> None:
    """Write files of equal length, enough for a split by path."""
    for number in range(count):
        (folder / f"{number:03d}.txt").write_text(f"text of file {number:03d}\n")


def test_files_are_split_by_their_path(tmp_path: Path) -> None:
    write_many(tmp_path)
    source = open_pattern(tmp_path / "*.txt")
    names = {span.path.name for span in source.validation}
    assert names == {f"{number:03d}.txt" for number in range(60) if in_validation(f"{number:03d}.txt")}
    assert len(names) + len(source.train) == 60
    assert 2 <= len(names) <= 15


def test_split_and_digest_do_not_depend_on_the_place(tmp_path: Path) -> None:
    sources = []
    for folder in ("a", "b/c"):
        (tmp_path / folder).mkdir(parents=True)
        write_many(tmp_path / folder)
        sources.append(open_pattern(tmp_path / folder / "*.txt"))
    assert sources[0].digest == sources[1].digest
    assert text_of(sources[0], "validation") == text_of(sources[1], "validation")


@pytest.mark.parametrize("change", ["content", "name", "new"])
def test_digest_follows_names_and_bytes(tmp_path: Path, change: str) -> None:
    write_many(tmp_path)
    before = open_pattern(tmp_path / "*.txt").digest
    if change == "content":
        (tmp_path / "007.txt").write_text("text of file 070\n")
    elif change == "name":
        (tmp_path / "007.txt").rename(tmp_path / "07.txt")
    else:
        (tmp_path / "new.txt").write_text("")
    assert open_pattern(tmp_path / "*.txt").digest != before


def test_about_a_tenth_of_all_keys_is_validation() -> None:
    assert 900 < sum(in_validation(str(number)) for number in range(10_000)) < 1100


def test_of_one_file_the_last_tenth_is_validation_cut_between_characters(tmp_path: Path) -> None:
    for text in ("abcdefghij" * 10, "€" * 101, "a" + "😀" * 77, "é" * 100):
        (tmp_path / "one.txt").write_text(text, encoding="utf-8", newline="")
        source = open_pattern(tmp_path / "one.txt")
        assert text_of(source, "train") + text_of(source, "validation") == text
        assert 0.07 < len(text_of(source, "validation")) / len(text) < 0.11


def test_a_lopsided_split_falls_back_to_the_last_tenth(tmp_path: Path) -> None:
    large = next(f"{number}.txt" for number in range(100) if in_validation(f"{number}.txt"))
    small = next(f"{number}.txt" for number in range(100) if not in_validation(f"{number}.txt"))
    (tmp_path / large).write_text("x" * 1000)
    (tmp_path / small).write_text("y" * 10)
    source = open_pattern(tmp_path / "*.txt")
    assert source.train_bytes == 909
    assert len(text_of(source, "validation")) == 101


def test_a_recursive_glob_and_the_home_folder_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "notes" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "notes" / "top.txt").write_text("top")
    (tmp_path / "notes" / "deep" / "er" / "low.txt").write_text("low")
    assert [path.name for path in find_files("~/notes/**/*.txt")] == ["low.txt", "top.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_found(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("text")
    assert find_files(str(tmp_path / "a[1].txt")) == [tmp_path / "a[1].txt"]


def test_a_missing_file_a_barren_glob_and_a_folder_are_refused(tmp_path: Path) -> None:
    for pattern in ("none.txt", "*.txt"):
        with pytest.raises(ValueError, match=r"matches no file.*check the path"):
            find_files(str(tmp_path / pattern))
    with pytest.raises(ValueError, match=r"is a folder.*\*\*/\*\.txt"):
        find_files(str(tmp_path))


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        open_pattern(tmp_path / "empty.txt")


@pytest.mark.parametrize("content", [b"caf\xe9 au lait", b"cut short \xe2\x82"])
def test_text_that_is_not_utf8_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latin.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8.*iconv"):
        open_pattern(tmp_path / "latin.txt")


def test_a_long_document_comes_in_pieces_that_join_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.data.source.PIECE_BYTES", 64)
    text = "eine Zeile mit Umlaut ü und €\r\n" * 50 + "x" * 500
    (tmp_path / "long.txt").write_bytes(text.encode())
    source = open_pattern(tmp_path / "long.txt")
    assert text_of(source, "train") + text_of(source, "validation") == text
    pieces = list(read_pieces(source.train[0]))
    assert len(pieces) > 20
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.endswith("\n") for piece, _ in pieces[:20])


def test_stdlib_leaves_out_what_distributions_strip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [f"module_{number}.py" for number in range(40)] + ["package/__init__.py", "package/testing.py"]
    dropped = ["test/a.py", "package/tests/a.py", "idlelib/idle_test/a.py", "site-packages/a.py", "dist-packages/a.py", "__pycache__/a.py"]
    for name in [*kept, *dropped, "readme.txt", "_sysconfigdata_linux.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# this is {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = open_stdlib()
    found = sorted(span.path.relative_to(tmp_path).as_posix() for span in source.train + source.validation)
    assert found == sorted(kept)


def test_a_python_without_stdlib_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"no \.py files under"):
        open_stdlib()
