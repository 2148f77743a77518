"""``slimctl doctor``: what this machine has, and what is missing for what."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

from slimctl import __version__
from slimctl.cli.options import Json
from slimctl.cli.output import Output
from slimctl.cli.table import Block, Facts, Table, Warned
from slimctl.core.cpu import cpu_features, has_dot_products, read_cpuinfo

DEPENDENCIES = (
    "numpy",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "pydantic",
    "pyyaml",
    "typer",
    "rich",
    "threadpoolctl",
)


class Extra(NamedTuple):
    """An optional part of the installation.

    Attributes:
        modules: What must be importable.
        adds: What it makes possible.
    """

    modules: tuple[str, ...]
    adds: str


EXTRAS = {
    "torch": Extra(("torch",), "training, import from torch, prune --importance taylor"),
    "data": Extra(("PIL", "datasets"), "images, IDX files and tables as data"),
    "dask": Extra(("distributed",), "sensitivity scans on a cluster (--executor dask:ADDRESS)"),
    "store": Extra(("fsspec", "s3fs"), "a ledger on S3 (output.store: s3://bucket/models)"),
}


def suggested_target(machine: str, features: Iterable[str] | None) -> str | None:
    """The built-in target that fits a CPU; None when too little is known about it."""
    if machine in ("aarch64", "arm64"):
        return "cpu-arm64"
    if features is None or machine not in ("x86_64", "AMD64"):
        return None
    return "cpu" if has_dot_products(features) else "cpu-avx2"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"slimctl": __version__, "python": platform.python_version()}
    for name in DEPENDENCIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _document() -> dict[str, Any]:
    from slimctl.graph.session import installed_providers

    features = cpu_features(read_cpuinfo())
    return {
        "versions": _versions(),
        "providers": installed_providers(),
        "cpu": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "features": features,
            "suggested_target": suggested_target(platform.machine(), features),
        },
        "extras": {
            name: {
                "installed": all(find_spec(module) for module in extra.modules),
                "adds": extra.adds,
            }
            for name, extra in EXTRAS.items()
        },
    }


def _blocks(document: dict[str, Any]) -> Iterable[Block]:
    versions, cpu = document["versions"], document["cpu"]
    yield Facts({name: text or "MISSING" for name, text in versions.items()}, title="Versions")
    yield Facts({"onnxruntime": ", ".join(document["providers"])}, title="Execution providers")
    yield Facts(
        {
            "machine": cpu["machine"],
            "cores": str(cpu["cores"]),
            "features": "unknown" if cpu["features"] is None else ", ".join(cpu["features"]),
            "suggested --target": cpu["suggested_target"] or "unknown",
        },
        title="CPU",
    )
    yield Table(
        ("extra", "state", "adds", "install with"),
        [
            (
                name,
                "installed" if extra["installed"] else "not installed",
                extra["adds"],
                "" if extra["installed"] else f'pip install "slimctl[{name}]"',
            )
            for name, extra in document["extras"].items()
        ],
        title="Extras",
    )
    if None in versions.values():
        yield Warned("a dependency is missing: reinstall slimctl")


def doctor(json: Json = False) -> None:
    """Show versions, providers, CPU features and extras."""
    document = _document()
    Output(json=json).result(document, list(_blocks(document)))
