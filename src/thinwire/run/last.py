"""What is done when a run ends: the last step is kept, the run summed up, and every run folder left with what it is to hold.

Neighbours get copies of the last checkpoint, all machines the tokenizer, and checkpoints that nobody needs go. Afterwards a machine that
keeps its neighbour's copies has, with two stages, the whole model in its run folder. The run is complete without all this: whoever is
asked to end, or loses a link here, leaves it out.
"""

from __future__ import annotations

import base64
import zlib
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

from thinwire.link.errors import Interrupted, LinkError, ProtocolError
from thinwire.link.message import TEXT, optional
from thinwire.pipeline import forms
from thinwire.pipeline.forms import PIECE, PIECES
from thinwire.pipeline.protocols import Abandoned
from thinwire.run.figures import summary
from thinwire.run.folder import TOKENIZER_FILE, write_summary
from thinwire.run.state import Training
from thinwire.run.telling import tell_what_is_kept
from thinwire.util.disk import shortage
from thinwire.util.files import write_atomic
from thinwire.util.notices import note, warn
from thinwire.util.shown import shown

LONGEST_BYTES = 1 << 26
"""Most bytes of a tokenizer."""


def keep_last(training: Training, stopped: bool) -> list[str | None]:
    """Write the last step and wait until it is on the disk; return what went wrong in each process."""
    training.save()
    problems: list[str | None] = training.group.gather(training.keeper.finish(), optional(TEXT))
    if stopped and not any(problems):
        tell_what_is_kept(training)
    return problems


def conclude(training: Training, loss: float, val_loss: float, problems: list[str | None]) -> dict[str, Any]:
    """Sum the run up, and leave the folders in order; raise if this process could not write its last step."""
    found = summary(training, loss, val_loss)
    if not any(problems):
        if training.has_first and training.group.replica == 0:
            write_summary(training.folder, found)
        settle_last(training)
    if problem := problems[training.group.number]:
        raise ValueError(problem)
    for other in filter(None, problems if training.keeper.backups is not None else ()):
        warn(f"another machine says: {shown(other, 500)}. Until then the last step of this run is not whole")
    return found


def end_early(training: Training) -> dict[str, Any]:
    """End at once: write the last committed step; return a summary without figures that would take time."""
    training.doing = "end"
    if training.state != "committing" and training.together:  # otherwise the last checkpoint stands
        training.save()
        if problem := training.keeper.finish():
            warn(problem)
    return {"steps": training.position.step, "val_loss": None}


def settle_last(training: Training) -> None:
    """Leave the run folder of every worker with what it is to hold, together with all others."""
    step, group, keeper = training.position.step, training.group, training.keeper
    finished = step >= training.config.train.steps
    try:
        with training.stop.listening(), training.stop.abandoning(group.abandon):
            if finished and keeper.backups is not None:
                share_tokenizer(training)
                keeper.copy_last(training.position)
            mine = {"saved": list(keeper.saver.written), "copied": finished and keeper.copied((step,)) == (step,)}
            votes = group.gather(mine, forms.ENDING)
    except Interrupted:  # whoever has taken a lost worker's place needs the others to get as far as this
        raise
    except (LinkError, Abandoned, KeyboardInterrupt) as error:
        with suppress(Abandoned):
            group.abandon()  # nobody is to wait for this worker
        if finished and keeper.backups is not None:
            note(f"not all copies of the last checkpoint were made: {error or 'stopped'}")
        return
    common = sorted(set.intersection(*(set(vote["saved"]) for vote in votes)))
    if step not in common:
        return
    if all(vote["copied"] for vote in votes):
        keeper.confirm(step)
    keeper.saver.confirm(step, (*common[-2:], keeper.confirmed))
    keeper.saver.close()  # whoever looks into the folder now finds what is to stay


def share_tokenizer(training: Training) -> None:
    """Give every worker the tokenizer that only first stages have read, unless it is too large for one message."""
    own = None if training.data is None else training.data.tokenizer_json
    message = None if not training.has_first else {"tokenizer": [] if own is None else packed(own)}
    parts = training.group.announce(message, forms.TOKENIZER)["tokenizer"]
    path = training.folder / TOKENIZER_FILE
    if not parts or path.exists():
        return
    text = unpacked(parts)  # what a peer has sent wrong is an OSError too, and none of this disk's
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        warn(f"{path} was not written: {shortage(path, error)}")


def packed(text: str) -> list[str]:
    """Cut a text into pieces that a message can carry: compressed, in base64; none if it is too long."""
    letters = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
    return [letters[start : start + PIECE] for start in range(0, len(letters), PIECE)] if len(letters) <= PIECES * PIECE else []


def unpacked(parts: list[str]) -> str:
    """Put such a text together; refuse what is no tokenizer, or longer than any."""
    try:
        text = zlib.decompressobj().decompress(base64.b64decode("".join(parts), validate=True), LONGEST_BYTES).decode()
        Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more special
        raise ProtocolError("tokenizer", f"{type(error).__name__}: {error}", "a tokenizer") from None
    return text
