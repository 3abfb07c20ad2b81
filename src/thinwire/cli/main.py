"""The `thinwire` command: one table of verbs, each loaded only when it is called.

Holds no settings and no work of its own: a verb's module parses its own options. Nothing heavy is imported here, so that
`thinwire --help` answers at once.

    thinwire VERB [OPTIONS ...]       python -m thinwire VERB [OPTIONS ...]
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
import textwrap

from thinwire import __version__
from thinwire.config.choices import choices

VERBS = {
    "train": ("train a model, all its stages and what crosses between them", "thinwire.cli.train:main"),
    "keys": ("make this machine's identity for links", "thinwire.cli.keys:keys"),
    "roster": ("put the workers of a run together: stages, addresses, certificates", "thinwire.cli.keys:roster"),
    "join": ("run one stage of a roster on this machine", "thinwire.cluster.join:main"),
    "eval": ("measure the validation loss of a finished or stopped run", "thinwire.cli.evaluate:main"),
    "export": ("write a run's checkpoint as a plain Hugging Face Llama folder", "thinwire.hf.export:main"),
    "import": ("start a run from a Hugging Face Llama folder", "thinwire.hf.importing:main"),
    "generate": ("write text with a finished or stopped run", "thinwire.cli.generate:main"),
    "data": ("tokenise a text or dataset into token shards", "thinwire.cli.data:main"),
    "memory": ("say how a stage would fit into a memory budget, and what that costs", "thinwire.cli.memory:main"),
    "compare": ("judge boundary methods or exchanges by time to loss over links", "thinwire.cli.compare:main"),
    "selftest": ("try codecs, exchanges and a few steps on this machine's device", "thinwire.cli.selftest:main"),
}
WITHOUT_TORCH = ("keys", "roster")
"""Verbs that run whatever torch is installed, or none."""


def overview() -> str:
    """Write the help text: usage and the table of verbs."""
    width = max(map(len, VERBS)) + 2
    lines = ["usage: thinwire VERB [OPTIONS ...]", "", "Train one transformer across machines joined by thin links.", ""]
    lines += [f"  {verb:{width}}{help_line}" for verb, (help_line, _) in VERBS.items()]
    lines += ["", "What can be named in the options of train, join, import, compare and memory:", ""]
    for option, names in choices().items():
        lines += textwrap.wrap(names, 79, initial_indent=f"  {option:21}", subsequent_indent=" " * 23)
    return "\n".join([*lines, "", "thinwire VERB --help lists the options of a verb; thinwire --version prints the version."])


def fail(message: str) -> int:
    """Print an error for the user and return its exit code."""
    print(f"thinwire: error: {message}", file=sys.stderr)
    return 2


def of_system(error: OSError) -> str:
    """Say in one line what the system refused, and of which file."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    names = [name if len(name) <= 200 else f"{name[:200]}..." for name in names]
    return ": ".join([*names, error.strerror or str(error) or type(error).__name__])


def print_anything() -> None:
    """Let output that knows few letters show others by their codes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def unknown(verb: str) -> str:
    """Say that a verb does not exist and which one may have been meant."""
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the verbs are {', '.join(VERBS)}."
    return f"there is no verb {verb!r}; {hint} thinwire --help lists them."


def main(argv: list[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    given = sys.argv[1:] if argv is None else argv
    print_anything()
    if not given or given[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if given[0] in ("-V", "--version"):
        print(f"thinwire {__version__}")
        return 0
    if given[0] not in VERBS:
        return fail(unknown(given[0]))
    module, function = VERBS[given[0]][1].split(":")
    try:
        if given[0] not in WITHOUT_TORCH:
            from thinwire.util.versions import check_torch  # not at the top: the help needs none of it

            if told := check_torch():
                print(f"thinwire: {told}", file=sys.stderr)
        return getattr(importlib.import_module(module), function)(given[1:]) or 0
    except ValueError as error:
        return fail(str(error))
    except BrokenPipeError:  # whoever read our output has gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a disk, a folder or a device: the system's own words say more than a traceback
        return fail(of_system(error))
    except KeyboardInterrupt:
        print("thinwire: stopped", file=sys.stderr)
        return 130
