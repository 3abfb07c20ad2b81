"""The form of what workers tell each other besides payloads: facts of the run, votes, figures. What it means is others' business."""

from __future__ import annotations

import re

from thinwire.link.message import ANY, FLAG, TEXT, fields, list_of, number, optional, rule, table_of, text_like, whole
from thinwire.util.checkpoint_name import NAME as CHECKPOINT_NAME

COUNT = number(0, 2.0**63)
STEP = whole(-2, 2**32 - 1)
"""A step; -1 and -2 stand for what is settled outside of steps."""
STEPS = list_of(whole(0, 10**12), 10**5)
SECONDS = number(0, 1e6)
"""A time that was measured: not even the slowest line takes two weeks for a payload."""
CHECKPOINT = text_like(CHECKPOINT_NAME, "the name of a checkpoint")
CHECKPOINTS = list_of(CHECKPOINT, 10**5)
VOTE = fields(
    {"steps": CHECKPOINTS, "copies": table_of(CHECKPOINTS, 2), "recovering": FLAG, "confirmed": whole(-1, 10**12)},
)
"""Which checkpoints a worker has, and of its neighbours."""
ABOUT_DATA = fields({"data": TEXT, "validation_rows": whole(1, 2**31), "resume": FLAG, "summarised": whole(-1, 10**12)}, others=True)
"""What the first stage says of its data."""
ORDER = fields(
    {
        "length": whole(1, 2**31),
        "limit": whole(0, 2**31),
        "end": optional(whole(0, 2**31)),
        "sampling": fields(
            {
                "temperature": number(0, 1e6),
                "top_k": optional(whole(1, 2**31)),
                "top_p": optional(number(0, 1)),
                "seed": whole(0, 2**63 - 1),
            }
        ),
    }
)
"""What text to write."""
ABOUT_ROWS = fields({"rows": whole(1, 2**31), "bytes_per_token": optional(number(1e-9, 1e9))})
"""The same for an evaluation."""
FINGERPRINT = fields({"fingerprint": ANY})
BASIS = fields({"basis": ANY})
HELD = fields({"checkpoints": CHECKPOINTS})
IN_FLIGHT = optional(whole(1, 2**31))
"""Most microbatches that a stage has the memory for; null: any number."""
ENDING = fields({"saved": STEPS, "copied": FLAG})
"""Which steps a worker has on its disk when the run has ended, and whether it has the copies of the last one."""
PIECE, PIECES = 4000, 2000
"""Characters and number of the pieces that a tokenizer is sent in."""
TOKENIZER = fields({"tokenizer": list_of(text_like(re.compile(rf"[A-Za-z0-9+/=]{{1,{PIECE}}}"), "base64"), PIECES)})
"""The run's tokenizer for those who have not read the data; no piece: none, or one that is too long."""
LAST = fields({"step": whole(0, 2**32 - 1), "outcome": optional(rule("an object", lambda value: isinstance(value, dict)))})
"""The last step that a worker has committed."""
TRAFFIC = fields({"tokens": COUNT, "forward": COUNT, "backward": COUNT, "ids": COUNT}, others=True)
SENT = fields({"framed": COUNT, "socket": COUNT, "framed_control": COUNT}, others=True)
PART = fields(
    {
        "hashes": table_of(TEXT, 10**6),
        "parameters": COUNT,
        "boundary": optional(TRAFFIC),
        "links": list_of(fields({"sent": SENT}, others=True), 10**4),
        "exchange": COUNT,
        "memory": ANY,
    },
)
"""A stage's part of the summary."""
PARTS = list_of(PART, 10**4)
