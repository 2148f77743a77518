"""The cache: what comes back, what is thrown away, what two processes do to each other."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from slimctl.calibration import cache as cache_module
from slimctl.calibration.cache import StatisticsCache
from slimctl.calibration.collect import Statistics
from slimctl.calibration.histogram import FloatHistogram
from slimctl.core.cache import cache_folder, cache_key
from slimctl.core.contract import InputMean, LinearInput

LAYERS = (
    LinearInput("conv", "x", (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)),
    LinearInput("deconv", "y", (2,), (2,), (1,), (0, 0), transposed=True, output_padding=(1,)),
)


def _statistics(seed: int = 0, size: int = 500) -> Statistics:
    rng = np.random.default_rng(seed)
    histogram = FloatHistogram()
    histogram.update(rng.normal(size=(2, size)).astype(np.float32))
    mean = rng.normal(size=(4, 3, 3))
    return Statistics(
        {"a/b:0": histogram, "empty": FloatHistogram()},
        LAYERS,
        {"conv": InputMean(mean, mean + 1, mean * 2), "deconv": InputMean(mean, None, mean)},
    )


def _check_equal(found: Statistics | None, expected: Statistics) -> None:
    assert found is not None
    assert found.layers == expected.layers
    assert list(found.histograms) == list(expected.histograms)
    for name, histogram in expected.histograms.items():
        ours = found.histograms[name].to_arrays()
        for key, array in histogram.to_arrays().items():
            np.testing.assert_array_equal(ours[key], array)
    assert list(found.means) == list(expected.means)
    for name, mean in expected.means.items():
        for one, other in zip(found.means[name], mean, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                np.testing.assert_array_equal(one, other)


def test_what_was_stored_comes_back(tmp_path: Path) -> None:
    cache = StatisticsCache(tmp_path)
    assert cache.load("k") is None
    cache.store("k", _statistics())
    _check_equal(cache.load("k"), _statistics())
    assert cache.load("other") is None and not cache.problem


def test_keys_depend_on_every_part_and_where_it_ends() -> None:
    keys = {cache_key(), cache_key("ab", "c"), cache_key("a", "bc"), cache_key("abc")}
    assert len(keys) == 4
    assert cache_key("model", "data") == cache_key("model", "data")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "text", "unsigned"])
def test_damaged_entries_are_thrown_away(tmp_path: Path, damage: str) -> None:
    cache = StatisticsCache(tmp_path)
    cache.store("k", _statistics())
    (path,) = cache.folder.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        del content[len(content) // 2 :]
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
    elif damage == "unsigned":
        content[:32] = bytes(32)  # the arrays themselves are all right
    else:
        content = bytearray() if damage == "emptied" else bytearray(b"not an entry at all")
    path.write_bytes(content)
    assert cache.load("k") is None
    assert "damaged" in cache.problem and not path.exists()
    cache.store("k", _statistics())
    _check_equal(cache.load("k"), _statistics())


def test_no_other_files_are_left(tmp_path: Path) -> None:
    cache = StatisticsCache(tmp_path)
    for key in ("a", "b", "a"):
        cache.store(key, _statistics())
    assert sorted(path.name for path in cache.folder.iterdir()) == ["a.npz", "b.npz"]


def test_the_least_recently_used_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = StatisticsCache(tmp_path)
    for age, key in ((300, "used"), (200, "old"), (100, "new")):
        cache.store(key, _statistics())
        path = cache.folder / f"{key}.npz"
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert cache.load("used") is not None
    size = (cache.folder / "new.npz").stat().st_size
    monkeypatch.setattr(cache_module, "_LIMIT_BYTES", 3 * size + 100)
    cache.store("newest", _statistics())
    assert cache.load("old") is None
    assert all(cache.load(key) is not None for key in ("used", "new", "newest"))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    cache = StatisticsCache(blocked)
    cache.store("k", _statistics())
    assert "cannot be cached" in cache.problem
    assert cache.load("k") is None


def _store_again_and_again(folder: str, seed: int) -> None:
    cache = StatisticsCache(Path(folder))
    for _ in range(15):
        cache.store("k", _statistics(seed, 5000))


def test_two_processes_never_show_each_other_a_part(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    writers = [
        context.Process(target=_store_again_and_again, args=(str(tmp_path), seed))
        for seed in range(2)
    ]
    for writer in writers:
        writer.start()
    cache = StatisticsCache(tmp_path)
    while any(writer.is_alive() for writer in writers):
        found = cache.load("k")
        assert not cache.problem
        if found is not None:
            assert found.histograms["a/b:0"].size == 10_000
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert cache.load("k") is not None


def test_the_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("SLIMCTL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "slimctl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "slimctl"
