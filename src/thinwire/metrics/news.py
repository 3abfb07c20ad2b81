"""What happens to a run, in words for people. An event is a small dict, as it also comes from a worker's pipe; `tell` words it.

Who prints the words is up to the verb: the supervisor of workers (`metrics/view.py`), `join`, or `train` itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.link.peer import STANDBYS, WorkerId
from thinwire.metrics.estimate import duration

Report = Callable[[dict[str, Any]], None]
"""Takes an event."""
PLACE = re.compile(r"replica (\d{1,7}) stage (\d{1,7})|standby (\d{1,7})(?= at |:| |$)")


def ignore(event: dict[str, Any]) -> None:
    """Tell nobody."""


def tell(event: Mapping[str, Any]) -> str | None:
    """Word an event; None: nothing that people need to know."""
    for name, words in WORDS.items():
        if name in event:
            return words(event)
    return None


def _corpus(event: Mapping[str, Any]) -> str:
    passes, steps, most = event["passes"], event["steps"], "at most " if event["limited"] else ""
    read = f"{most}{steps:,} steps of {event['tokens_per_step']:,} tokens read it {passes:.2f} times"
    text = f"corpus: {event['corpus']:,} training tokens; {read}"
    if passes <= 1:
        return text
    once = int(steps / passes)
    return (
        f"{text}\nwarning: that is more than one pass: from step {once:,} on the model sees text again, and its loss tells less than "
        f"the validation loss; give more text, or --train.steps {max(1, once)}"
    )


def _examples(event: Mapping[str, Any]) -> str:
    text = f"{event['examples']:,} examples to train on in {event['windows']:,} windows"
    cut = f"; {event['cut']:,} are longer than model.context and were cut" if event["cut"] else ""
    return text + cut + (f"; {event['left_out']:,} were left out: no answer within model.context" if event["left_out"] else "")


def _silent(event: Mapping[str, Any]) -> str:
    problem = f" ({event['problem']})" if event["problem"] else ""
    return f"no word from {event['silent']} since {event['since']}{problem}; giving up in {duration(event['left'])}"


def _waiting(event: Mapping[str, Any]) -> str:
    how = f"dialling {event['address']}" if event["address"] else "which dials in here"
    problem = f" (last try: {event['problem']})" if event["problem"] else ""
    return f"waiting for {event['waiting']}, {how}{problem}; giving up in {duration(event['left'])}"


def _stopped(event: Mapping[str, Any]) -> str:
    who, timed = event["stopped_by"], event["time_limit"]
    why = f"{who} {'has reached its time limit, --train.seconds' if timed else 'was asked to stop'}"
    return f"stopping after step {event['after']}: {why if who else 'the time limit --train.seconds is reached'}"


def _kept(event: Mapping[str, Any]) -> str:
    twice = "" if event["pressed"] else " twice"  # the first one asks for a stop, which is under way
    return f"step {event['kept']} is kept in {shlex.quote(event['folder'])}; validating, Ctrl-C{twice} leaves that out"


WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "reading": lambda event: f"reading {event['reading']}",
    "tokenising": lambda event: f"tokenising {event['tokenising']}: once, it is kept in {event['cache']}",
    "examples": _examples,
    "awaiting": lambda event: f"waiting for {event['awaiting']} to read the data",
    "corpus": _corpus,
    "listening": lambda event: f"listening on {event['listening']}",
    "waiting": _waiting,
    "connected": lambda event: f"connected to {event['connected']}, round trip {milliseconds(event['rtt'])}",
    "measured": lambda event: f"the line to {event['measured']}: {rate(event['mbps'])}, round trip {milliseconds(event['rtt'])}",
    "silent": _silent,
    "back": lambda event: f"{event['back']} is back after {duration(event['after'])}",
    "abandoned": lambda event: (
        f"{'new links' if event['fruitless'] else 'step {} is given up'.format(event['abandoned'] + 1)}: {event['why']}"
    ),
    "restored": lambda event: f"all stages go on from step {event['restored']}" + again(event),
    "stopped_by": _stopped,
    "ending": lambda event: f"ending at once: {event['ending']}",
    "kept": _kept,
}


def again(event: Mapping[str, Any]) -> str:
    """Say how many steps are done again."""
    count = event.get("again", 0)
    return f"; {count} step{'s are' if count > 1 else ' is'} done again" if count > 0 else ""


def milliseconds(seconds: float | None) -> str:
    """Write a short time."""
    return "unknown" if seconds is None else f"{1000 * seconds:.1f} ms"


def rate(mbps: float) -> str:
    """Write a rate."""
    return f"{mbps:.1f} Mbit/s" if mbps < 100 else f"{mbps:,.0f} Mbit/s"


def named(text: str, called: Callable[[WorkerId], str]) -> str:
    """Put the names by which workers are called in the place of numbers."""

    def name(match: re.Match[str]) -> str:
        replica, stage, standby = match.groups()
        return called(WorkerId(STANDBYS, int(standby)) if standby else WorkerId(int(replica), int(stage)))

    return PLACE.sub(name, text)


def called(worker_id: WorkerId, replicas: int) -> str:
    """Name a worker of a run on one machine: most have one replica."""
    return str(worker_id) if replicas > 1 else f"stage {worker_id.stage}"
