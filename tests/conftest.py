"""One torch thread: several threads beside other processes are slower than one. Workers and identities for the whole session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from runs import write_config
from thinwire.link.identity import Identity, make_identity
from workers import Pool

torch.set_num_threads(1)
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no defect
settings.load_profile("busy")
MOST_STAGES = 8


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    try:
        yield pool
    finally:
        pool.close()


@pytest.fixture(scope="session")
def identities(tmp_path_factory) -> list[Identity]:
    folder: Path = tmp_path_factory.mktemp("stages")
    return [make_identity(folder / str(stage), f"stage-{stage}") for stage in range(MOST_STAGES)]


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(tmp_path, token_cache) -> str:
    """Write the tiny config and its text; return the config's path."""
    return write_config(tmp_path, token_cache)
