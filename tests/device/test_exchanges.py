"""What replicas exchange on the strict device: the bytes and the parameters of the CPU, also when they go on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replicas.test_laws import REPLICAS, STEPS, VARIANTS, Replica, config_of, trained
from replicas.together import together
from thinwire.config.registry import EXCHANGES
from thinwire.replicas.peers import Peers


@pytest.mark.parametrize("name, options", VARIANTS, ids=str)
def test_replicas_end_with_the_parameters_of_the_cpu(strict, name, options):
    config = config_of(name, options)
    there = replace(config, device="strict")

    def stopped(peers: Peers) -> Replica:
        return Replica(there, peers).run(range(3)).resumed(there).run(range(3, STEPS))

    for one, other in zip(trained(config), together(REPLICAS, stopped), strict=True):
        for parameter, tensor in one.named.items():
            assert other.named[parameter].device == torch.device("strict:0")
            assert torch.allclose(tensor, other.named[parameter].cpu(), rtol=0, atol=1e-6), parameter


def test_every_exchange_is_tried():
    assert {name for name, _ in VARIANTS} == set(EXCHANGES.names())
