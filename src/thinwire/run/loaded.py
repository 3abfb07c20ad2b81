"""A run's newest checkpoint as one plain torch module: ids in, logits out, all stages in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.config.sections import Device, RunConfig
from thinwire.model.ends import Context
from thinwire.model.stage import Stage
from thinwire.pipeline.inprocess import build_pipeline
from thinwire.run.saved import for_use, load_here, read_settings
from thinwire.util.device import choose_device


class LoadedModel(nn.Module):
    """All stages of a run, one behind the other; what crosses a boundary is rounded as in training, dropout is off."""

    def __init__(self, config: RunConfig, stages: list[Stage], step: int) -> None:
        super().__init__()
        self.config, self.step = config, step
        self.stages = nn.ModuleList(stages)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits (B x T x vocabulary) of the token behind each of these; gradients flow."""
        ids_BT = ids_BT.to(next(self.parameters()).device)
        # The ends of a boundary leave nothing that packing into bytes would still change.
        context = Context(self.step, torch.arange(len(ids_BT), device=ids_BT.device), training=False)
        payload: tuple[Tensor, ...] = ()
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=self.config.train.dtype == "bf16"):
            for stage in self.stages:
                assert isinstance(stage, Stage)
                payload = stage.predict(ids_BT, payload, context)
        return payload[0]


def load_model(run: Path, device: Device = "auto") -> LoadedModel:
    """Load the newest checkpoint of which all stages are in a run folder."""
    config = for_use(read_settings(run), "inprocess", "open", device)
    stages = build_pipeline(config, choose_device(config.device)).stages
    return LoadedModel(config, stages, load_here(run, stages)).eval()
