"""What replicas exchange on the strict device: the bytes and the parameters of the CPU, also when they go on from a checkpoint."""

from __future__ import annotations

import pytest
import torch

from thinwire.config.registry import EXCHANGES
from thinwire.replicas.peers import Peers
from thinwire.testing.exchange_laws import REPLICAS, STEPS, Replica, config_of_variant, trained, variants_of_exchanges
from thinwire.testing.together import together
from thinwire.util.device import choose_device

VARIANTS = variants_of_exchanges()


@pytest.mark.parametrize("name, options", VARIANTS, ids=str)
def test_replicas_end_with_the_parameters_of_the_cpu(strict, name, options):
    config, device = config_of_variant(name, options), choose_device("strict")

    def stopped(peers: Peers) -> Replica:
        return Replica(config, peers, device).run(range(3)).resumed(config).run(range(3, STEPS))

    for one, other in zip(trained(config), together(REPLICAS, stopped), strict=True):
        for parameter, tensor in one.named.items():
            assert other.named[parameter].device == torch.device("strict:0")
            assert torch.allclose(tensor, other.named[parameter].cpu(), rtol=0, atol=1e-6), parameter


def test_every_exchange_is_tried():
    assert {name for name, _ in VARIANTS} == set(EXCHANGES.names())
