"""SPECs: one line of text says which method, with which options, takes part in a comparison. No torch here.

NAME[:WORD=VALUE,...]     anchored:rank=32,bits=4      subspace:rank=16,model.ffn=900      --exchange local:steps=20,replicas.graph=ring
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.config.specs import split_spec

FORM = "NAME[:WORD=VALUE,...], such as subspace:rank=16"
EXCHANGE_FORM = "NAME[:WORD=VALUE,...], such as powersgd:rank=4"


@dataclass(frozen=True)
class Spec:
    """A codec with its options, and words of the config that differ for it alone."""

    text: str
    codec: str | None
    """None: the config's own, with its options."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the codec."""
    words: tuple[tuple[str, Any], ...] = ()
    """Words of the config, such as `model.ffn`."""
    heading: str | None = None
    """Group of the table."""

    @property
    def slug(self) -> str:
        """Name the spec so that a file can bear it: anchored-rank32-bits4."""
        parts = [part.replace("=", "", 1) for part in re.split("[:,]", self.text)]
        return re.sub(r"[^\w.-]+", "_", "-".join(parts))


def parse_spec(text: str, heading: str | None = None) -> Spec:
    """Read one SPEC."""
    name, found = split_spec(text, "codec", FORM)
    options = tuple((word, value) for word, value in found.items() if "." not in word)
    return Spec(text, name, options, tuple((word, value) for word, value in found.items() if "." in word), heading)


def parse_exchange(text: str, heading: str | None = None) -> Spec:
    """Read an exchange as a spec: its own words make `replicas.exchange`, those with a dot are words of the config."""
    name, found = split_spec(text, "method", EXCHANGE_FORM)
    own = [item for item in text.partition(":")[2].split(",") if item and "." not in item.partition("=")[0]]
    words = tuple((word, value) for word, value in found.items() if "." in word)
    return Spec(text, None, (), (("replicas.exchange", f"{name}:{','.join(own)}" if own else name), *words), heading)


def parse_specs(arguments: Iterable[str], parse: Callable[..., Spec] = parse_spec) -> list[Spec]:
    """Read SPECs and @FILEs in their order; a spec that was given before is refused."""
    specs: list[Spec] = []
    for argument in arguments:
        specs += read_specs(Path(argument[1:]), parse) if argument.startswith("@") else [parse(argument)]
    seen: dict[str, Spec] = {}
    for spec in specs:
        if spec.slug in seen:
            raise ValueError(f"the spec {spec.text!r} is given twice (as {seen[spec.slug].text!r}); leave one out")
        seen[spec.slug] = spec
    return specs


def read_specs(path: Path, parse: Callable[..., Spec] = parse_spec) -> list[Spec]:
    """Read a file of SPECs, one per line; `# text` is the heading of what follows."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; @FILE names a text file with one SPEC per line") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    specs: list[Spec] = []
    heading = None
    for line in filter(None, map(str.strip, lines)):
        if line.startswith("#"):
            heading = line.lstrip("#").strip() or None
        else:
            specs.append(parse(line, heading))
    if not specs:
        raise ValueError(f"{path} holds no spec; write one per line: {FORM}")
    return specs
