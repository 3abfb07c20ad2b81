"""Files that others make and take away at the same time."""

from __future__ import annotations

import threading
from pathlib import Path

from thinwire.cluster.backups import Copies
from thinwire.util.files import files_below, matching


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert matching(tmp_path / "gone", "*") == []


def test_folders_may_go_while_they_are_listed(tmp_path):
    """Copies are listed by one thread while another deletes old ones: neither is disturbed."""
    over = threading.Event()

    def come_and_go() -> None:
        for number in range(2000):
            folder = tmp_path / f"step-{number % 7:06d}"
            folder.mkdir()
            (folder / "stage-1.json").touch()
            (folder / "stage-1.json").unlink()
            folder.rmdir()
        over.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    kept = tmp_path / "step-999999" / "stage-1.json"
    kept.parent.mkdir()
    kept.touch()
    while not over.is_set():
        assert kept in Copies._parts(Path(tmp_path), "stage-1.json")
    thread.join()


def test_all_files_below_a_folder_and_none_beyond_a_link(tmp_path):
    for name in ("top/b/c.txt", "top/a.txt", "top/skipped/d.txt", "beside/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "top/away").symlink_to(tmp_path / "beside", target_is_directory=True)
    (tmp_path / "top/linked.txt").symlink_to(tmp_path / "beside/e.txt")
    (tmp_path / "top/broken.txt").symlink_to(tmp_path / "nowhere")
    found = [path.relative_to(tmp_path / "top").as_posix() for path in files_below(tmp_path / "top", {"skipped"})]
    assert found == ["a.txt", "b/c.txt", "linked.txt"]
    assert files_below(tmp_path / "gone") == []
