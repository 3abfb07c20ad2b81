"""One trained run and its folder for all tests that only read them."""

from pathlib import Path

import pytest

from hf.support import export, train_run
from runs import write_config


@pytest.fixture(scope="session")
def settings_file(tmp_path_factory, token_cache) -> str:
    return write_config(tmp_path_factory.mktemp("trained"), token_cache)


@pytest.fixture(scope="session")
def run(settings_file) -> Path:
    """A subspace run whose basis has moved."""
    return train_run(settings_file, Path(settings_file).with_name("run"), "--codec.drift_every", "1", "--codec.drift_rate", "0.5")


@pytest.fixture(scope="session")
def folder(run) -> Path:
    """That run as a plain folder of several shards."""
    return export(run, run.with_name("folder"), "--shard-size", "30KB")
