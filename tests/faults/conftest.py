"""One text and one undisturbed run of each kind for all faults."""

from pathlib import Path

import pytest

from faults.support import WORDS
from runs import train, write_config


@pytest.fixture(scope="session")
def settings(tmp_path_factory, token_cache) -> str:
    return write_config(tmp_path_factory.mktemp("faults"), token_cache)


@pytest.fixture(scope="session")
def quiet(settings):
    """Return a function that gives the hashes of an undisturbed run, in one process."""
    known: dict[tuple[str, ...], list[str]] = {}

    def hashes(*words: str) -> list[str]:
        if words not in known:
            known[words] = train(settings, Path(settings).with_name(f"quiet-{len(known)}"), *WORDS, *words)["weights_sha256"]
        return known[words]

    return hashes
