"""Feed rubbish to everything that reads what others wrote: greetings, votes, outcomes, manifests, rosters, payloads, configs and more.

    python bench/fuzz.py [--inputs 100000] [--seed 0] [TARGET ...]
    python bench/fuzz.py --atheris [--inputs 100000] [TARGET ...]       # with the package atheris, if it is installed

An input is refused with the kind of error that its reader declares (a ValueError, or a LinkError that is safe to show), or it is taken.
Anything else, two seconds for one input (twice, if it was not busy), or more memory than `MEMORY` ends the run with the input and its
traceback. Good inputs must be taken.
Inputs are made from good ones (`fuzz_targets.py`) by changes of values and of bytes (`fuzz_changes.py`); those that reach new lines
of thinwire are kept, and changed further.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import thinwire

sys.path.insert(0, str(Path(__file__).parent))
from fuzz_changes import changed

if TYPE_CHECKING:
    from fuzz_targets import Target

SECONDS = 2.0
"""Most time for one input; one that took longer without using the processor is tried again, for a busy machine may have held it up."""
HANG_SECONDS = 60
"""When an input is taken to hang for ever, on a busy machine too."""
MEMORY = 8 * 2**30
MEMORY_DISK = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where files go: a disk would only make it slow."""
MOST_KEPT = 5000
NAMES = ("hello", "votes", "outcomes", "facts", "manifests", "rosters", "copies", "configs", "places", "questions", "frames", "payloads")
ROOT = str(Path(thinwire.__file__).parent)


class Found(Exception):
    """An input that does what no input may do."""


class Coverage:
    """Which lines of thinwire have ever followed which."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self.new = False

    def watch(self, function: Callable[[], None]) -> bool:
        """Call a function; tell whether it went where none went before."""
        self.new = False
        sys.settrace(self._call)
        try:
            function()
        finally:
            sys.settrace(None)
        return self.new

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(ROOT):
            return None
        before = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before
            edge = (name, before, frame.f_lineno)
            before = frame.f_lineno
            if edge not in self.seen:
                self.seen.add(edge)
                self.new = True
            return line

        return line


def load(*, instrumented: bool = False) -> dict[str, Target]:
    """Import thinwire and what is fed; atheris has to see that to count where an input goes."""
    if instrumented:
        import atheris

        with atheris.instrument_imports(include=["thinwire"]):
            from fuzz_targets import TARGETS
    else:
        from fuzz_targets import TARGETS
    return TARGETS


def judge(target: Target, data: bytes, folder: Path, outcomes: collections.Counter[str], again: bool = True) -> str:
    """Run one input; return how it ended, or raise Found for what must not happen."""
    used, started = time.thread_time(), time.monotonic()
    try:
        target.run(data, folder)
        outcome = "taken"
    except target.kinds as error:
        outcome = type(error).__name__
        if target.foreign and not (len(str(error)) <= 4000 and str(error).isprintable()):
            raise Found(f"a message that cannot be shown: {str(error)!r:.300}") from error
    except Exception as error:
        raise Found(f"{type(error).__name__}: {str(error)[:300]}") from error
    used, waited = time.thread_time() - used, time.monotonic() - started
    if used > SECONDS or (waited > SECONDS and not again):
        raise Found(f"{used:.1f} s of processor time, {waited:.1f} s in all")
    if waited > SECONDS:
        return judge(target, data, folder, outcomes, again=False)
    outcomes[outcome] += 1
    return outcome


def fuzz(name: str, inputs: int, seed: int, *, guided: bool = True) -> str:
    """Run one target; return what happened, in a line."""
    target, generator = load()[name], random.Random(f"{name} {seed}")
    outcomes: collections.Counter[str] = collections.Counter()
    coverage, longest, started = Coverage(), 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        corpus = target.seeds(Path(folder))
        good = len(corpus)
        for number in range(inputs):
            data = corpus[number] if number < good else changed(generator, generator.choice(corpus), generator.choice(corpus), target.text)
            before = time.thread_time()
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
            try:
                if number < good and (judge(target, data, Path(folder), outcomes) == "taken") == (number in target.refused):
                    raise Found("a good input is refused, or a bad one is taken")
                if not guided:
                    judge(target, data, Path(folder), outcomes)
                elif coverage.watch(lambda data=data: judge(target, data, Path(folder), outcomes)) and number >= good:
                    corpus = [*corpus[:good], *corpus[good:][1 - MOST_KEPT :], data]
            except Found as found:
                place = Path(tempfile.gettempdir()) / f"fuzz-{name}.bin"
                place.write_bytes(data)
                raise Found(f"{name}, input {number}, kept in {place}: {found}; it begins {data[:200]!r}") from found.__cause__
            longest = max(longest, time.thread_time() - before)
    faulthandler.cancel_dump_traceback_later()
    ends = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common())
    kept = f"{len(coverage.seen)} edges, {len(corpus) - good} inputs kept; " if guided else ""
    return f"{name}: {inputs} inputs in {time.perf_counter() - started:.0f} s; {kept}longest {1000 * longest:.0f} ms; {ends}"


def fuzz_with_atheris(name: str, inputs: int, seed: int) -> None:
    """Let libFuzzer look for inputs, in this process, which it ends."""
    target, outcomes = load(instrumented=True)[name], collections.Counter[str]()
    import atheris

    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(target.seeds(Path(folder))):
            (corpus / str(number)).write_bytes(data)
        atheris.Setup(
            [
                sys.argv[0],
                f"-runs={inputs}",
                f"-seed={seed + 1}",
                "-max_len=8192",
                "-timeout=10",
                "-rss_limit_mb=0",
                f"-artifact_prefix={tempfile.gettempdir()}/fuzz-{name}-",
                str(corpus),
            ],
            lambda data: judge(target, data, Path(folder), outcomes),
        )
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="what to feed; nothing: everything")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    options = parser.parse_args()
    names = options.targets or NAMES
    if options.atheris and len(names) > 1:
        words = ["--atheris", "--inputs", str(options.inputs), "--seed", str(options.seed)]
        sys.exit(max(subprocess.call([sys.executable, __file__, *words, name]) for name in names))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for name in names:
        if options.atheris:
            fuzz_with_atheris(name, options.inputs, options.seed)
        else:
            print(fuzz(name, options.inputs, options.seed), flush=True)


if __name__ == "__main__":
    main()
