"""Check or clean the testbed, as root, from bench/.

../.venv/bin/python -m testbed check --rate 80 --delay 25 --loss 0.005 --congestion bbr
../.venv/bin/python -m testbed clean
"""

from __future__ import annotations

import argparse
import sys

from testbed import check, namespaces


def clean() -> None:
    """Remove what beds of dead processes have left."""
    found = namespaces.stale()
    for name in found:
        namespaces.remove(name)
        print(f"removed {name}")
    if not found:
        print("nothing is left over")


def main() -> None:
    parser = argparse.ArgumentParser(prog="testbed", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    check.add_arguments(verbs.add_parser("check", help="measure a path against what was asked"))
    verbs.add_parser("clean", help="remove namespaces and processes that a killed run has left")
    arguments = parser.parse_args()
    if reason := namespaces.obstacle():
        sys.exit(f"testbed: {reason}")
    try:
        clean() if arguments.verb == "clean" else check.run(arguments)
    except ValueError as error:
        sys.exit(f"testbed: {error}")


if __name__ == "__main__":
    main()
