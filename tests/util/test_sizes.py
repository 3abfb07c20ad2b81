"""Sizes in words."""

from __future__ import annotations

import pytest

from thinwire.util.sizes import read_size, write_size


@pytest.mark.parametrize(
    "text, size",
    [
        ("2GB", 2_000_000_000),
        ("500MB", 500_000_000),
        ("1.5GiB", 1_610_612_736),
        ("1.5 gib", 1_610_612_736),
        (".5KB", 500),
        ("64kib", 65_536),
        ("1TB", 10**12),
        ("7", 7),
        ("12B", 12),
        ("1.5 MB", 1_500_000),
        ("64KiB", 65536),
        ("3g", 3 * 10**9),
        ("3 Mi", 3 * 2**20),
    ],
)
def test_sizes_are_read(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "2GBs", "two GB", "-2GB", "1e9", "2,5GB", "inf", "0", "0.0GB", "0.4B", "2 G B", "²GB", "٣GB"])
def test_what_is_no_size_is_refused_with_the_setting_and_an_example(text):
    with pytest.raises(ValueError, match=r"memory\.budget") as refused:
        read_size(text)
    assert repr(text) in str(refused.value) and "500MB" in str(refused.value)


@pytest.mark.parametrize("text", ["", "0GB", "-1MB", "GB", "2XB"])
def test_the_setting_is_the_one_that_was_named(text):
    with pytest.raises(ValueError, match="--shard-size is"):
        read_size(text, "--shard-size")


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (23_456_789, "23.5 MB"),
        (123_456_789, "123 MB"),
        (2e9, "2.00 GB"),
        (3.2e12, "3.20 TB"),
    ],
)
def test_sizes_are_written_with_three_digits(size, text):
    assert write_size(size) == text


def test_rounded_up_is_never_less():
    for size in (1, 999, 1001, 9_999_999, 10_000_001, 123_456_789, 999_999_999, 1_000_000_001):
        written = write_size(size, up=True)
        assert size <= read_size(written) <= max(size + 1, size * 1.011), written
