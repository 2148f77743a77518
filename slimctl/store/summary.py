"""What the history shows: of a version, out of its manifest, and of all versions of a name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slimctl.store.log import Summary
from slimctl.store.state import State


def gates_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All gates of a manifest, those that measure times among them."""
    return [*manifest["results"]["gates"], *manifest["run"]["gates"]]


def summary_of(manifest: Mapping[str, Any], changes: tuple[str, ...] | None) -> Summary:
    """The summary of a version.

    Args:
        manifest: Its manifest.
        changes: What differs from the version before.
    """
    results = manifest["results"]
    return Summary(
        size_bytes=manifest["model"]["size_bytes"],
        sqnr_db=_finite(results["sqnr_db"]),
        metric=results["metric"],
        metric_result=results["metric_result"],
        failed_gates=tuple(gate["gate"] for gate in gates_of(manifest) if not gate["passed"]),
        changes=changes,
    )


def _finite(value: Any) -> float | None:
    """A number of a manifest, in which an infinity is a text."""
    return None if value is None or not math.isfinite(float(value)) else float(value)


def history_document(place: str, state: State) -> dict[str, Any]:
    """Versions of a name as JSON types.

    Args:
        place: The store, as the user wrote it.
        state: What its log says.
    """
    return {
        "store": place,
        "name": state.name,
        "current": state.current.number if state.current else None,
        "versions": [
            {
                "version": version.number,
                "at": version.entry.at,
                "accepted": version.entry.accepted,
                "current": version.current,
                "labels": version.labels,
                "has_files": version.has_files,
                "manifest_hash": version.entry.manifest_hash,
                **version.entry.summary.model_dump(),
            }
            for version in state.versions
        ],
    }
