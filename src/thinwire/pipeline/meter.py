"""Count what crosses the boundaries: payload bytes by direction, and the tokens they carried."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Meter:
    """Payload bytes and tokens of one boundary, plus the seconds spent packing, unpacking and waiting."""

    tokens: int = 0
    forward: int = 0
    """Payload bytes forward, ids included."""
    ids: int = 0
    """The part of `forward` that is ids."""
    backward: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    wait_seconds: float = 0.0

    def counts(self) -> dict[str, int]:
        """Return the counters alone."""
        return {"tokens": self.tokens, "forward": self.forward, "ids": self.ids, "backward": self.backward}


@dataclass
class Traffic:
    """The meters of all boundaries."""

    boundaries: list[Meter] = field(default_factory=list)

    def per_token(self, label: str) -> float:
        """Return the mean of a byte count per token and boundary."""
        tokens = sum(meter.tokens for meter in self.boundaries)
        return sum(getattr(meter, label) for meter in self.boundaries) / tokens if tokens else 0.0

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds spent encoding, decoding and waiting since the last call."""
        spans = {"encode_seconds": 0.0, "decode_seconds": 0.0, "wait_seconds": 0.0}
        for meter in self.boundaries:
            for label in spans:
                spans[label] += getattr(meter, label)
                setattr(meter, label, 0.0)
        return spans

    def figures(self, seconds: float) -> dict[str, float]:
        """Return what to tell of a step that took so long: bytes per token, and the seconds of each kind."""
        spans = self.take_seconds()
        size = self.per_token("forward") + self.per_token("backward")
        return {"bytes_per_token": size, "compute_seconds": seconds - sum(spans.values()), **spans}
