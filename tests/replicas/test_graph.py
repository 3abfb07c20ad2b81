"""Which replicas are joined, the weights of gossip, and the tree that reaches everyone."""

from __future__ import annotations

import pytest

from thinwire.replicas.graph import make_graph


@pytest.mark.parametrize(
    ("text", "count", "degrees"),
    [
        ("complete", 4, [3, 3, 3, 3]),
        ("complete", 2, [1, 1]),
        ("ring", 5, [2] * 5),
        ("ring", 2, [1, 1]),
        ("torus", 4, [2] * 4),
        ("torus", 6, [3] * 6),
        ("torus", 12, [4] * 12),
        ("0-1,2-1,3-2", 4, [1, 2, 2, 1]),
    ],
)
def test_everyone_is_joined_and_the_mean_is_kept(text, count, degrees):
    graph = make_graph(text, count)
    assert [len(graph.neighbours(replica)) for replica in range(count)] == degrees
    for replica in range(count):
        weights = [graph.weight(replica, other) for other in graph.neighbours(replica)]
        assert 0 < sum(weights) < 1
        way, here = 0, replica
        while here != 0:
            here = graph.parents[here]
            way += 1
            assert way < count
        assert all(graph.parents[child] == replica for child in graph.children(replica))


def test_a_ring_of_eight_weighs_a_third():
    assert set(make_graph("ring", 8).weights.values()) == {1 / 3}


@pytest.mark.parametrize(
    ("text", "count", "reason"),
    [
        ("0-1,2-3", 4, "not connected: no way leads from replica 0 to 2, 3"),
        ("0-1:0.6,1-2:0.6", 3, "not doubly stochastic: those of replica 1 add up to 1.2"),
        ("0-1:0", 2, "the weight 0"),
        ("0-1:much", 2, "the weight 'much'"),
        ("0-0,0-1", 2, "two different replicas"),
        ("0-2", 2, "from 0 to 1"),
        ("0-1,1-0", 2, "twice"),
        ("star", 3, "two replicas such as 0-1"),
        ("torus", 5, "no rectangle"),
    ],
)
def test_what_cannot_work_is_refused_by_name(text, count, reason):
    with pytest.raises(ValueError, match=reason):
        make_graph(text, count)
