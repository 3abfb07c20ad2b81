"""What can be named on the command line, for help texts: codecs, exchanges, link profiles and configs. Imports none of them."""

from __future__ import annotations

from pathlib import Path

from thinwire.config.profiles import PROFILES
from thinwire.config.registry import ARCHITECTURES, CODECS, EXCHANGES


def config_names() -> list[str]:
    """List the configs that come with the package."""
    return sorted(path.stem for path in (Path(__file__).parent / "packaged").glob("*.toml"))


def choices() -> dict[str, str]:
    """Say for each option that takes a name which names there are."""
    return {
        "--model.architecture": ", ".join(ARCHITECTURES.names()),
        "--codec.name": ", ".join(CODECS.names()),
        "--exchange.name": ", ".join(EXCHANGES.names()),
        "--link.profile": f"{', '.join(PROFILES)}, or your own such as 20mbps_30ms",
        "--config": f"{', '.join(config_names())}, or a file that ends in .toml",
    }
