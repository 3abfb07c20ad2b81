"""Train one transformer across machines joined by thin links.

The public names are loaded when they are first used, so that `import thinwire` is quick; docs/python.md shows them at work.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.api import Config as Config
    from thinwire.api import compare as compare
    from thinwire.api import evaluate as evaluate
    from thinwire.api import export_model as export_model
    from thinwire.api import generate as generate
    from thinwire.api import load as load
    from thinwire.api import register_codec as register_codec
    from thinwire.api import register_exchange as register_exchange
    from thinwire.api import train as train
    from thinwire.codecs.base import Codec as Codec
    from thinwire.metrics.track import Tracker as Tracker
    from thinwire.replicas.exchange import Exchange as Exchange

__version__ = "0.1.0"
_PLACES = {"Codec": "thinwire.codecs.base", "Exchange": "thinwire.replicas.exchange", "Tracker": "thinwire.metrics.track"}
"""Modules of the public names that are not in `thinwire.api`."""
__all__ = [
    "Codec",
    "Config",
    "Exchange",
    "Tracker",
    "__version__",
    "compare",
    "evaluate",
    "export_model",
    "generate",
    "load",
    "register_codec",
    "register_exchange",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_PLACES.get(name, "thinwire.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
