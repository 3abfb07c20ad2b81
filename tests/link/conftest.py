"""Identities shared by the tests of the link."""

from __future__ import annotations

import pytest

from link.support import World


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("identities"))
