"""Try on this machine what could not be tried everywhere: `thinwire selftest --device cuda`.

The laws of all codecs and exchanges, two steps of training with each codec against the CPU, and the time that copies take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro

from thinwire.config.registry import CODECS
from thinwire.config.sections import Device
from thinwire.testing import codec_laws, exchange_laws
from thinwire.testing.copies import time_copies
from thinwire.testing.training import trains_as_on_the_cpu
from thinwire.util.device import choose_device

MOST_SHOWN = 20
"""Failures that are told one by one."""


@dataclass(frozen=True, kw_only=True)
class SelftestCommand:
    """Run the laws of codecs and exchanges, two steps of training with each codec, and time copies."""

    device: Device = "auto"
    """Where to compute."""


class Tally:
    """Count what was tried, and keep what failed."""

    def __init__(self) -> None:
        self.tried = 0
        self.failures: list[str] = []

    def attempt(self, what: str, call: Callable[..., object], *given: object) -> object:
        """Try something; whatever it raises is a failure of that, and the next is tried."""
        self.tried += 1
        try:
            return call(*given)
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")
            return None


def main(argv: list[str]) -> int:
    """Run the self-test; return 1 if anything failed."""
    command = tyro.cli(SelftestCommand, args=argv, prog="thinwire selftest")
    device, started, tally = choose_device(command.device), time.monotonic(), Tally()
    torch.set_num_threads(1)  # everything here is small: more threads would only wait for each other
    print(f"device {device}, torch {torch.__version__}", flush=True)
    for title, part in (("codecs", try_codecs), ("exchanges", try_exchanges), ("training", try_training)):
        before, failed = tally.tried, len(tally.failures)
        said = part(tally, device)
        print(f"{title}: {tally.tried - before} tried, {len(tally.failures) - failed} failed{said}", flush=True)
    for line in tally.failures[:MOST_SHOWN]:
        print(f"  {line}")
    if len(tally.failures) > MOST_SHOWN:
        print(f"  and {len(tally.failures) - MOST_SHOWN} more")
    for copy in time_copies(device):
        pinned = ", pinned" if copy.pinned else ""
        rate = copy.bytes_per_second / 1e9
        print(f"copy {copy.way}{pinned}: {copy.size / 1e6:.2f} MB in {copy.seconds * 1e3:.3f} ms, {rate:.1f} GB/s")
    passed = "all passed" if not tally.failures else f"{len(tally.failures)} of {tally.tried} failed"
    print(f"{passed} in {time.monotonic() - started:.0f} s")
    return 1 if tally.failures else 0


def try_codecs(tally: Tally, device: torch.device) -> str:
    """Run the laws of all codecs; those of values with every kind of them."""
    for name, options in codec_laws.variants_of_codecs():
        for law, call in codec_laws.LAWS.items():
            for kind in codec_laws.INPUTS if law in codec_laws.OF_INPUTS else ("",):
                tally.attempt(f"codec {name} {options}, {law}", call, name, options, device, *([kind] if kind else []))
    return ""


def try_exchanges(tally: Tally, device: torch.device) -> str:
    """Run the laws of all exchanges."""
    for name, options in exchange_laws.variants_of_exchanges():
        for law, call in exchange_laws.LAWS.items():
            tally.attempt(f"exchange {name} {options}, {law}", call, name, options, device)
    return ""


def try_training(tally: Tally, device: torch.device) -> str:
    """Train with each codec, here and on the CPU; say how far the losses are apart."""
    found = [tally.attempt(f"training with {name}", trains_as_on_the_cpu, name, device) for name in CODECS.names()]
    worst = max((difference for difference in found if isinstance(difference, float)), default=0.0)
    return f", losses within {worst:.1e} of the CPU's"
