"""What `summary.json` says: the figures of a finished run, put together from what each stage says of itself."""

from __future__ import annotations

from typing import Any

from thinwire.checkpoint import combined_sha256
from thinwire.config import RunConfig

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


def summarise(config: RunConfig, run: dict[str, Any], stages: list[dict[str, Any]], peaks: list[int | None]) -> dict[str, Any]:
    """Return the summary of a run; `stages` are the parts that `Trainer.summary` makes, `peaks` the memory of each process."""
    boundaries = [stage["boundary"] for stage in stages if stage["boundary"] is not None]
    tokens = sum(boundary["tokens"] for boundary in boundaries)
    forward, backward, ids = (
        sum(boundary[name] for boundary in boundaries) / tokens if tokens else 0.0 for name in ("forward", "backward", "ids")
    )
    uncompressed = 2 * config.model.width * ITEM_BYTES[config.train.dtype]
    links = [link for stage in stages for link in stage["links"]]
    hashes = {name: value for stage in stages for name, value in stage["hashes"].items()}
    return {
        **run,
        "trainable_parameters": sum(stage["parameters"] for stage in stages),
        "codec": config.codec.name,
        "stages": len(stages),
        "model_sha256": combined_sha256(hashes),
        "weights_sha256": [combined_sha256(stage["hashes"]) for stage in stages],
        "bytes_per_token_forward": forward,
        "bytes_per_token_backward": backward,
        "bytes_per_token_ids": ids,
        "framed_bytes": sum(link["sent"]["framed"] for link in links) if links else None,
        "socket_bytes": sum(link["sent"]["socket"] for link in links) if links else None,
        "compression": uncompressed / (forward + backward) if forward else None,
        "link": config.link.profile,
        "peak_rss_bytes": peaks,
        "memory": [stage["memory"] for stage in stages],
    }
