"""A zip of the whole artifact: checksums, a bill of materials, and the same bytes every time.

``NAME/`` holds the artifact's files under the names that its manifest knows, so that what is
unpacked is an artifact again, ``SHA256SUMS`` for ``sha256sum -c`` and ``sbom.cdx.json``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimctl.core.errors import OutputError
from slimctl.core.files import sha256_of_file
from slimctl.export.common import Export, model_files, plain_name, register
from slimctl.export.sbom import bill_of_materials
from slimctl.pipeline.artifact import manifest_path

if TYPE_CHECKING:
    from slimctl.pipeline.artifact import Artifact

SUMS_NAME = "SHA256SUMS"
SBOM_NAME = "sbom.cdx.json"

_FIRST_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest that a zip can say: when it was packed is no property of what is in it."""

_READABLE = 0o100644 << 16
_UNIX = 3


@register
class Zip(Export):
    """The whole artifact in one file."""

    name = "zip"
    summary = "The artifact in one file, with checksums and SBOM (CycloneDX)"
    suffix = ".zip"

    def write(self, artifact: Artifact, target: Path) -> Sequence[str]:
        """Packs the files of the artifact and what is written about them."""
        files = {file.name: file for file in _files(artifact)}
        sums = {name: sha256_of_file(file) for name, file in files.items()}
        bill = json.dumps(bill_of_materials(artifact.manifest), indent=2, ensure_ascii=False) + "\n"
        sums[SBOM_NAME] = hashlib.sha256(bill.encode()).hexdigest()
        folder = plain_name(artifact.manifest.name)
        # Stored: compressors of other versions write other bytes, and weights of 8 bits shrink
        # little.
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            _add_text(archive, f"{folder}/{SUMS_NAME}", _sums_text(sums))
            _add_text(archive, f"{folder}/{SBOM_NAME}", bill)
            for name in sorted(files):
                _add_file(archive, f"{folder}/{name}", files[name])
        return [f"unpacked, {folder}/ is an artifact; 'sha256sum -c {SUMS_NAME}' checks it"]


def _files(artifact: Artifact) -> Iterator[Path]:
    """The model, its weights, the manifest, and what was made for people.

    Raises:
        OutputError: A page was changed since the artifact was made.
    """
    yield from model_files(artifact)
    yield manifest_path(artifact.path)
    for entry in artifact.manifest.run.files:
        file = artifact.model.with_name(entry.name)
        if not file.is_file():
            continue  # a copy without its pages is still whole
        if sha256_of_file(file) != entry.sha256:
            raise OutputError(
                file,
                "The file is not the one that the manifest describes",
                fix="make the artifact again, or remove this page",
            )
        yield file


def _sums_text(sums: dict[str, str]) -> str:
    return "".join(f"{sums[name]}  {name}\n" for name in sorted(sums))


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, date_time=_FIRST_TIME)
    entry.external_attr = _READABLE
    entry.create_system = _UNIX
    return entry


def _add_text(archive: zipfile.ZipFile, name: str, text: str) -> None:
    archive.writestr(_entry(name), text.encode())


def _add_file(archive: zipfile.ZipFile, name: str, file: Path) -> None:
    entry = _entry(name)
    entry.file_size = file.stat().st_size  # decides between zip and zip64 before it is written
    with archive.open(entry, "w") as target, file.open("rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)
