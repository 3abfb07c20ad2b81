"""Target, steps and time to loss, on curves made by hand."""

from __future__ import annotations

import pytest

from thinwire.board.score import Pace, Reached, SpecRows, find_target, mean_curve, score, steps_to, value_at
from thinwire.board.subjects import CODECS, EXCHANGES


def learnt(curve: dict[int, float], forward: float = 10.0, backward: float = 10.0, seed: int = 0) -> dict:
    return {
        "seed": seed,
        "curve": {str(step): loss for step, loss in curve.items()},
        "val_loss": curve[max(curve)],
        "trainable_parameters": 7,
        "bytes_per_token_forward": forward,
        "bytes_per_token_backward": backward,
    }


def speed(seconds: float) -> dict:
    return {"seconds_per_step": seconds, "tokens_per_second": 64 / seconds, "peak_rss_bytes": [100, 300, 200]}


def entry(label: str, *rows: dict, speeds: dict | None = None, warmup: int = 0) -> SpecRows:
    return SpecRows(label, None, warmup, rows, speeds or {})


DENSE = entry("dense", learnt({100: 6.0, 200: 5.0, 300: 4.0, 400: 3.0}, 102, 100), speeds={"thin": speed(10.0)})


def test_interpolation():
    assert value_at({100: 6.0, 200: 5.0}, 125) == 5.75
    assert value_at({100: 6.0, 200: 5.0}, 200) == 5.0
    assert value_at({100: 6.0, 200: 5.0}, 99) is None and value_at({100: 6.0, 200: 5.0}, 201) is None
    assert value_at({100: 6.0}, 100) == 6.0 and value_at({}, 1) is None


def test_steps_to_a_loss():
    curve = {100: 6.0, 200: 5.0, 300: 5.5, 400: 4.0}
    assert steps_to(curve, 5.25) == Reached(175.0)
    assert steps_to(curve, 5.0) == Reached(200.0)
    assert steps_to(curve, 4.75) == Reached(350.0)
    assert steps_to(curve, 6.0) == Reached(100, at_most=True)
    assert steps_to(curve, 3.9) is None and steps_to({}, 3.9) is None


def test_curves_of_several_seeds():
    assert mean_curve([{200: 5.0, 100: 6.0}, {100: 7.0, 200: 6.0, 250: 1.0}]) == {100: 6.5, 200: 5.5}
    assert mean_curve([]) == {}


def test_the_target_is_dense_at_half_of_the_steps():
    assert find_target([DENSE], 400, CODECS) == 5.0
    assert find_target([entry("dense", *DENSE.learn, learnt({100: 6.0, 200: 4.0, 400: 3.0}))], 300, CODECS) == pytest.approx(5.25)
    assert find_target([entry("dense"), DENSE], 400, CODECS) is None
    assert find_target([entry("dense:bits=8", *DENSE.learn)], 400, CODECS) is None


def test_a_board():
    other = entry("other", learnt({100: 7.0, 200: 6.0, 300: 4.0, 400: 3.3}, 11, 9), speeds={"thin": speed(1.0)})
    board = score([DENSE, other], ["thin", "none"], 5.0, CODECS)
    dense, mine = board.standings
    assert dense.links["thin"].time == 2000.0 and dense.links["thin"].faster == 1.0
    assert mine.reached == Reached(250.0) and mine.links["thin"].time == 250.0 and mine.links["thin"].faster == 8.0
    assert (
        mine.above == pytest.approx(10.0)
        and mine.spread is None
        and mine.judged == 20
        and mine.sent == {"forward": 11, "backward": 9}
        and mine.fewer == pytest.approx(10.1)
    )
    assert mine.peak_rss_bytes == 300 and mine.links["none"].time is None and mine.links["none"].tokens_per_second is None


def test_not_reached_and_missing():
    slow = entry("slow", learnt({100: 9.0, 400: 8.0}), speeds={"thin": speed(1.0)})
    missing = entry("missing", speeds={"thin": speed(1.0)})
    _, never, absent = score([DENSE, slow, missing], ["thin"], 5.0, CODECS).standings
    assert never.reached is None and never.curve and never.links["thin"].time is None and never.links["thin"].faster is None
    assert absent.loss is None and not absent.curve and absent.links["thin"].tokens_per_second == 64


def test_without_dense_there_is_time_but_no_ratio():
    (alone,) = score([entry("other", *DENSE.learn, speeds={"thin": speed(2.0)})], ["thin"], 5.0, CODECS).standings
    assert alone.links["thin"].time == 400.0 and alone.links["thin"].faster is None and alone.above is None and alone.fewer is None


def test_spread_of_several_seeds():
    (dense,) = score([entry("dense", learnt({1: 4.0}), learnt({1: 4.3}), learnt({1: 4.1}))], [], None, CODECS).standings
    assert dense.loss == pytest.approx(4.1333, abs=1e-4) and dense.spread == pytest.approx(0.15) and dense.seeds == 3


def test_uncompressed_steps_take_the_time_of_dense():
    assert Pace(1.0, warmup=50, warmup_seconds=10.0).time(20) == 200.0
    warm = entry("warm", *DENSE.learn, speeds={"thin": speed(1.0)}, warmup=50)
    _, mine = score([DENSE, warm], ["thin"], 5.0, CODECS).standings
    assert mine.links["thin"].time == 50 * 10.0 + 150 * 1.0
    (alone,) = score([warm], ["thin"], 5.0, CODECS).standings
    assert alone.links["thin"].time is None and alone.links["thin"].tokens_per_second == 64


def test_the_distance_is_that_of_the_same_seeds():
    dense = entry("dense", learnt({100: 4.0}), learnt({100: 5.0}, seed=1))
    board = score([dense, entry("one", learnt({100: 4.4})), entry("other", learnt({100: 5.0}, seed=2))], [], None, CODECS)
    assert [standing.above for standing in board.standings] == [0.0, pytest.approx(10.0), None]


def test_exchanges_are_judged_by_what_replicas_exchange_and_against_allreduce():
    parts = {"bytes_per_step_boundary": 50.0, "bytes_per_step_control": 5.0}
    plain = entry(
        "allreduce", learnt({100: 6.0, 200: 5.0, 400: 4.0}) | parts | {"bytes_per_step_exchange": 800.0}, speeds={"thin": speed(8.0)}
    )
    local = entry("local", learnt({100: 6.0, 200: 5.5, 400: 4.2}) | parts | {"bytes_per_step_exchange": 20.0}, speeds={"thin": speed(1.0)})
    assert find_target([local, plain], 400, EXCHANGES) == 5.0 and find_target([local, plain], 400, CODECS) is None
    mine, other = score([local, plain], ["thin"], 5.0, EXCHANGES).standings
    assert mine.fewer == 40.0 and mine.sent == {"exchange": 20.0, "boundary": 50.0, "control": 5.0}
    assert mine.above == pytest.approx(5.0) and other.above == 0.0 and other.fewer == 1.0
    assert other.links["thin"].time == 1600.0 and mine.links["thin"].faster == pytest.approx(1600 / (200 + 200 * 0.5 / 1.3))
