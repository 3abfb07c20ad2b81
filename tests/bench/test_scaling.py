"""bench/scaling.py: equal parameters, what is run next, and a fit that finds the curve that rows were made from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaling_fit import fit_all, write_document
from scaling_jobs import Job, all_jobs, config_of, count_parameters, missing_jobs, settings

DENSE = Job(64, 300, "dense", 0, "stdlib", 0)


def made_up(a: float = 0.05, b: float = 0.7, e: float = -0.4, t: float = 0.2) -> dict:
    """Return rows of gaps that follow the formula."""
    rows = {}
    for job in all_jobs():
        tokens, gap = job.steps * 2048, 0.2
        if job.method not in ("dense", "nothing"):
            gap = a * (max(job.compression, 4) / 32) ** b * (job.width / 256) ** e * (tokens / 1e6) ** t
        loss = 4.0 * (1 + gap * (job.method != "dense"))
        rows[job] = {"val_loss": loss, "compression": job.compression or 4, "tokens": tokens, "trainable_parameters": 1}
    return rows


def test_a_fit_finds_the_curve_that_rows_were_made_from(tmp_path):
    fitted = fit_all(made_up())
    found = {name: part["value"] for name, part in fitted["methods"]["entropy"]["parameters"].items()}
    assert found == pytest.approx({"a": 0.05, "b": 0.7, "e": -0.4, "t": 0.2}, rel=1e-3)
    assert "b" not in fitted["methods"]["dense4"]["parameters"], "it has one compression"
    write_document(fitted, tmp_path)
    assert "one value of compression" in (tmp_path / "scaling.md").read_text() and (tmp_path / "scaling.png").exists()


def test_an_interval_holds_what_noise_hides():
    rows = {job: row | {"val_loss": row["val_loss"] * (1 + 0.001 * (-1) ** number)} for number, (job, row) in enumerate(made_up().items())}
    part = fit_all(rows)["methods"]["entropy"]["parameters"]["b"]
    assert part["low"] < 0.7 < part["high"] and part["low"] < part["value"] < part["high"]


def test_few_rows_make_no_curve():
    rows = {job: row for job, row in made_up().items() if job.width == 64 and job.steps == 300 and job.compression in (0, 32)}
    found = fit_all(rows)["methods"]["entropy"]
    assert found["rows"] == 1 and found["parameters"]["a"]["low"] is None and len(found["notes"]) == 3


@pytest.mark.parametrize("method, compression", [("dense4", 0), ("nothing", 0), ("subspace", 32), ("anchored", 32), ("entropy", 100)])
def test_trainable_parameters_are_those_of_dense(method, compression):
    job = replace(DENSE, method=method, compression=compression)
    counts = [count_parameters(config_of(each, "stdlib")) for each in (job, DENSE)]
    assert counts[0] == pytest.approx(counts[1], rel=1e-3)


def test_what_cannot_be_had_is_left_out():
    assert settings(replace(DENSE, method="anchored", compression=200)) is None
    assert settings(replace(DENSE, method="entropy", compression=200))["codec.rate"] == 1.28
    assert all(settings(job) is not None for job in all_jobs())


def test_dense_comes_first_and_close_rows_get_all_seeds():
    assert missing_jobs({}, ("stdlib",))[0] == DENSE
    job = replace(DENSE, method="anchored", compression=32)
    for gap, seeds in ((0.02, 0), (0.005, 2)):
        found = missing_jobs({DENSE: 4.0, job: 4.0 * (1 + gap)}, ("stdlib",))
        assert sum(each in found for each in (replace(job, seed=1), replace(job, seed=2), replace(DENSE, seed=2))) == seeds * 3 // 2
        assert job not in found and DENSE not in found
