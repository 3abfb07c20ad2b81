"""What is done when a run has ended: all copies of the last checkpoint, the tokenizer everywhere, and no checkpoint that nobody needs.

Afterwards a machine that keeps its neighbour's copies has, with two stages, the whole model in its run folder. The run is complete without
all this: whoever is asked to end, or loses a link here, leaves it out.
"""

from __future__ import annotations

import base64
import sys
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from thinwire import checkpoint
from thinwire.link.errors import Interrupted, LinkError, ProtocolError
from thinwire.pipeline import forms
from thinwire.pipeline.forms import PIECE, PIECES
from thinwire.run.saved import TOKENIZER_FILE
from thinwire.run.stop import Abandoned
from thinwire.util.disk import shortage, warn
from thinwire.util.files import write_atomic

if TYPE_CHECKING:
    from thinwire.run.trainer import Trainer

LONGEST_BYTES = 1 << 26
"""Most bytes of a tokenizer."""


def settle_last(trainer: Trainer) -> None:
    """Leave the run folder of every worker with what it is to hold, together with all others."""
    step, pipeline = trainer.position.step, trainer.pipeline
    finished = step >= trainer.config.train.steps
    try:
        with trainer.stop.listening(), trainer.stop.abandoning(pipeline.abandon):
            if finished and pipeline.keeps_copies:
                share_tokenizer(trainer)
                folder = checkpoint.checkpoint_folder(trainer.folder, trainer.position, trainer.facts)
                size = sum(path.stat().st_size for path in folder.glob("stage-*"))
                print(
                    f"thinwire: neighbours get copies of the last checkpoint, {size / 1e6:.1f} MB; Ctrl-C twice leaves them out",
                    file=sys.stderr,
                )
                pipeline.copy_last(folder.name)
            mine = {"saved": list(trainer.keeper.saver.written), "copied": finished and pipeline.copied((step,)) == (step,)}
            votes = pipeline.gather_values(mine, forms.ENDING)
    except Interrupted:  # whoever has taken a lost worker's place needs the others to get as far as this
        raise
    except (LinkError, Abandoned, KeyboardInterrupt) as error:
        with suppress(Abandoned):
            pipeline.abandon()  # nobody is to wait for this worker
        if finished and pipeline.keeps_copies:
            print(f"thinwire: note: not all copies of the last checkpoint were made: {error or 'stopped'}", file=sys.stderr, flush=True)
        return
    common = sorted(set.intersection(*(set(vote["saved"]) for vote in votes)))
    if step not in common:
        return
    if all(vote["copied"] for vote in votes):
        trainer.keeper.confirm(step)
    trainer.keeper.saver.confirm(step, (*common[-2:], trainer.keeper.confirmed))


def share_tokenizer(trainer: Trainer) -> None:
    """Give every worker the tokenizer that only first stages have read, unless it is too large for one message."""
    own = None if trainer.data is None else trainer.data.tokenizer_json
    message = None if trainer.data is None else {"tokenizer": [] if own is None else packed(own)}
    parts = trainer.pipeline.announce(message, forms.TOKENIZER)["tokenizer"]
    path = trainer.folder / TOKENIZER_FILE
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
