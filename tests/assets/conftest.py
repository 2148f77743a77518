"""Real models from package registries, skipped with the reason where none can be reached."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import assets

REQUIRED = os.environ.get("SLIMCTL_REQUIRE_ASSETS") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.asset)


@pytest.fixture(scope="session")
def asset_files() -> Callable[[str], list[Path]]:
    """Files of an asset by name; the registry is asked once per session for what it lacks."""
    refused: dict[str, str] = {}

    def fetch(name: str) -> list[Path]:
        package = assets.ASSETS[name].package
        try:
            if package not in refused:
                return assets.fetch(name)
        except assets.AssetUnreachableError as error:
            refused[package] = str(error)
        if REQUIRED:
            pytest.fail(refused[package], pytrace=False)
        pytest.skip(refused[package])

    return fetch


@pytest.fixture(scope="session")
def asset(asset_files: Callable[[str], list[Path]]) -> Callable[[str], Path]:
    """The file of an asset that is a single file."""

    def fetch_one(name: str) -> Path:
        (path,) = asset_files(name)
        return path

    return fetch_one


@pytest.fixture(scope="session")
def fonts(asset_files: Callable[[str], list[Path]]) -> list[Path]:
    """Faces of several font families."""
    return [path for name in assets.FONTS for path in asset_files(name)]
