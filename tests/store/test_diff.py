"""What differs between two manifests, and how many things that is."""

from __future__ import annotations

from typing import Any

import pytest

from slimctl.store.changes import changes_between, changes_in_words
from slimctl.store.diff import diff_manifests
from tests.store.results import manifest, step

DATA = {"source": "calib.npz", "sha256": "a" * 64, "samples": 64}
OTHER = {"source": "other.npz", "sha256": "b" * 64, "samples": 128}
FUSE, PRUNE = step("fuse", {}, metric=0.9), step("prune", {"sparsity": 0.3}, metric=0.8)
MORE = step("prune", {"sparsity": 0.4}, metric=0.7)
EQUALIZE = step("equalize", {"rounds": 2}, metric=0.85)


def document(**changes: Any) -> dict[str, Any]:
    return manifest(**changes).document()


@pytest.mark.parametrize(
    ("before", "after", "words", "things"),
    [
        ({}, {}, (), []),
        ({}, {"steps": (FUSE, MORE)}, ("steps.1.sparsity 0.3 -> 0.4",), ["steps.1.sparsity"]),
        ({}, {"steps": (FUSE, EQUALIZE, PRUNE)}, ("steps.1 +equalize",), ["steps.1"]),
        ({}, {"steps": (PRUNE,)}, ("steps.0 -fuse",), ["steps.0 removed"]),
        (
            {},
            {"steps": (EQUALIZE, MORE)},
            ("steps.0 -fuse", "steps.0 +equalize", "steps.1.sparsity 0.3 -> 0.4"),
            ["steps.0 removed", "steps.0", "steps.1.sparsity"],
        ),
        (
            {"calibration": DATA},
            {"calibration": OTHER},
            (
                "data.calibration.source calib.npz -> other.npz",
                "data.calibration.sha256 aaaaaaaaaaaa -> bbbbbbbbbbbb",
                "data.calibration.samples 64 -> 128",
            ),
            ["data.calibration"],
        ),
        (
            {},
            {"versions": {"slimctl": "1.1", "numpy": "2.1", "onnx": "1"}},
            (
                "versions.slimctl 1.0 -> 1.1",
                "versions.numpy 2.0 -> 2.1",
                "versions.onnx - -> 1",
            ),
            ["versions.slimctl", "versions.numpy", "versions.onnx"],
        ),
        (
            {},
            {"target": "cuda", "seed": 3},
            ("target cpu -> cuda", "seed 0 -> 3"),
            ["target", "seed"],
        ),
    ],
)
def test_changes(
    before: dict[str, Any], after: dict[str, Any], words: tuple[str, ...], things: list[str]
) -> None:
    first, second = document(**before), document(**after)
    assert changes_in_words(first, second) == words
    assert list(diff_manifests(first, second).things) == things


def test_a_bound_of_a_gate_is_listed_and_not_counted() -> None:
    before, after = document(), document()
    after["results"]["gates"][0]["bound"] = 0.4
    found = diff_manifests(before, after)
    assert [change.in_words() for change in found.changes] == ["gates.size 0.5 -> 0.4"]
    assert found.things == ()


def test_another_original_is_one_thing() -> None:
    before, after = document(), document()
    after["source"]["content_hash"] = "d" * 64
    assert [change.thing for change in changes_between(before, after)] == ["model"]


def test_many_changes_in_few_words() -> None:
    after = document(seed=1, target="cuda", steps=(), versions={})
    assert changes_in_words(document(), after) == (
        "target cpu -> cuda",
        "steps.0 -fuse",
        "steps.1 -prune",
        "3 more",
    )


def test_each_step_has_its_own_part() -> None:
    found = diff_manifests(document(), document(steps=(FUSE, EQUALIZE, MORE)))
    assert [row.name for row in found.steps] == ["fuse", "equalize", "prune"]
    fuse, equalize, prune = found.steps
    assert fuse.before is not None and fuse.before.metric_change == 0.0
    assert equalize.before is None
    assert prune.before is not None and prune.after is not None
    assert (prune.before.metric_change, prune.after.metric_change) == (-0.1, -0.15)
    assert (prune.before.position, prune.after.position) == (1, 2)


def test_speedups_are_compared_and_not_times() -> None:
    before, after = document(), document()
    for side, milliseconds in ((before, 2.0), (after, 1.0)):
        side["run"]["latency"] = {"original": {"p50_ms": 4.0}, "result": {"p50_ms": milliseconds}}
    speedup = diff_manifests(before, after).measured[-1]
    assert speedup == ("speedup_p50", 2.0, 4.0)


def test_two_metrics_are_two_rows() -> None:
    after = document()
    after["results"].update(metric="f1", metric_result=0.6)
    rows = {row.what: row[1:] for row in diff_manifests(document(), after).measured}
    assert (rows["top1"], rows["f1"]) == ((0.8, None), (None, 0.6))
