"""How a board of exchanges is written."""

from __future__ import annotations

from thinwire.board.score import Board, Standing
from thinwire.board.subject import EXCHANGES
from thinwire.board.table import MISSING, Facts, Style, conditions, disturbance_text, loss_text, seconds, time_text, times


def learning_cells(standing: Standing, seeds: int) -> dict[str, str]:
    """Write what concerns loss and bytes."""
    return {
        "exchange": standing.label,
        "loss": loss_text(standing, seeds),
        f"to {EXCHANGES.reference}": MISSING if standing.distance is None else f"{standing.distance:+.2f} %",
        **{f"KB {part}": kilobytes(standing, part) for part in EXCHANGES.parts},
        "fewer": times(standing.fewer),
    }


def kilobytes(standing: Standing, part: str) -> str:
    """Write what all workers together send in a step."""
    value = standing.sent.get(part)
    return MISSING if value is None else seconds(value / EXCHANGES.scale)


def link_cells(standing: Standing, name: str) -> dict[str, str]:
    """Write what concerns one link."""
    link = standing.links[name]
    return {
        "s/step": MISSING if link.pace is None else seconds(link.pace.seconds),
        "s to loss": time_text(standing, link),
        "faster": times(link.faster),
    }


def preamble(board: Board, facts: Facts) -> list[str]:
    """Write what the table is about."""
    text = (
        f"{conditions(board, facts)} Losses are means over the replicas. KB (1,000 bytes) are what all workers together send in a step: "
        "messages between replicas, payloads of boundaries with ids, and control with its frames; fewer: exchange alone."
    )
    return [text, f"    {facts.line}", *disturbance_text(facts)]


EXCHANGE_STYLE = Style(
    heading="#",
    learning=learning_cells,
    link=link_cells,
    long={
        "loss": "validation loss",
        "KB exchange": "KB/step exchange",
        "KB boundary": "boundary",
        "KB control": "control",
        "fewer": f"fewer than {EXCHANGES.reference}",
        "s to loss": "time to loss, s",
        "faster": f"faster than {EXCHANGES.reference}",
    },
    bytes="KB per step, all workers",
    preamble=preamble,
)
