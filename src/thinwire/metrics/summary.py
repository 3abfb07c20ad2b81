"""What `summary.json` says: the figures of a finished run, put together from what each stage says of itself."""

from __future__ import annotations

from typing import Any

from thinwire.checkpoint import combined_sha256
from thinwire.config.options import spec_of
from thinwire.config.sections import RunConfig

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
    hashes = {name: value for stage in stages[: config.pipeline.stages] for name, value in stage["hashes"].items()}
    first = stages[: config.pipeline.stages]  # replica 0, which `export` takes; others may differ a little between meetings
    return {
        **{name: value for name, value in run.items() if name != "timed_steps"},
        "trainable_parameters": sum(stage["parameters"] for stage in first),
        "codec": config.codec.name,
        "stages": len(first),
        "replicas": config.replicas.count,
        "exchange": spec_of(config.exchange) if config.replicas.count > 1 else None,
        "model_sha256": combined_sha256(hashes),
        "weights_sha256": [combined_sha256(stage["hashes"]) for stage in stages],
        "bytes_per_token_forward": forward,
        "bytes_per_token_backward": backward,
        "bytes_per_token_ids": ids,
        "bytes_per_step": bytes_per_step(stages, run["timed_steps"]),
        "framed_bytes": sum(link["sent"]["framed"] for link in links) if links else None,
        "socket_bytes": sum(link["sent"]["socket"] for link in links) if links else None,
        "compression": uncompressed / (forward + backward) if forward + backward else None,
        "link": config.link.profile,
        "peak_rss_bytes": peaks,
        "memory": [stage["memory"] for stage in stages],
    }


def bytes_per_step(workers: list[dict[str, Any]], steps: int) -> dict[str, float] | None:
    """Split what all workers together send in a step: payloads of boundaries, messages of the exchange, and control with its frames."""
    if not steps or not any(worker["links"] for worker in workers):
        return None
    boundaries = [worker["boundary"] for worker in workers if worker["boundary"] is not None]
    return {
        "boundary": sum(boundary["forward"] + boundary["backward"] for boundary in boundaries) / steps,
        "exchange": sum(worker["exchange"] for worker in workers) / steps,
        "control": sum(link["sent"]["framed_control"] for worker in workers for link in worker["links"]) / steps,
    }
