"""Pictures for calibration and evaluation: seeded crops of photographs and of cut-out objects.

No source picture is used for both. Picture ``i`` of a set depends on ``i`` alone, so a set of 16 is
the beginning of a set of 256.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.assets import fetch

IMAGE_SIZE = 224
SEED = 20
CALIBRATION_SHARE = 1 / 3
CENTER_SHARE = 0.875  # of the shorter side, as usual for ImageNet: 224 of 256
SMALLEST_STAMP = 150  # pixels; smaller ones would be mostly interpolation
STAMP_SUBJECTS = (
    "animals", "clothes", "food", "hobbies", "household", "plants", "sports", "vehicles",
)  # fmt: skip


class Preprocessing(StrEnum):
    """How pixels of 0..255 become the network's input."""

    CENTERED = "centered"  # (x - 127) / 128, as EfficientNet-lite was trained
    IMAGENET = "imagenet"  # (x - mean) / standard deviation of each channel


# Mean and standard deviation of ImageNet's channels, of pixels of 0..255.
IMAGENET = (
    255 * np.array([0.485, 0.456, 0.406]),
    255 * np.array([0.229, 0.224, 0.225]),
)


@dataclass(frozen=True)
class Sources:
    """The pictures that a set is cut from."""

    photographs: Sequence[Path]
    stamps: Sequence[Path]
    seed: int


def calibration_sources() -> Sources:
    """A third of the pictures, drawn by the seed."""
    photographs, stamps = _all_sources()
    return Sources(_split(photographs)[0], _split(stamps)[0], SEED)


def evaluation_sources() -> Sources:
    """All pictures that calibration does not see."""
    photographs, stamps = _all_sources()
    return Sources(_split(photographs)[1], _split(stamps)[1], SEED + 1)


@cache
def _all_sources() -> tuple[list[Path], list[Path]]:
    return fetch("imagenet-20"), [path for path in fetch("stamps") if _is_natural(path)]


def _is_natural(path: Path) -> bool:
    parts = path.parts[path.parts.index("stamps") + 1 :]
    if parts[0] not in STAMP_SUBJECTS or {"cartoon", "toys", "plastic"} & set(parts):
        return False
    with Image.open(path) as image:
        return min(image.size) >= SMALLEST_STAMP


def _split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    order = np.random.default_rng(SEED).permutation(len(paths))
    shuffled = [paths[index] for index in order]
    first = round(CALIBRATION_SHARE * len(paths))
    return shuffled[:first], shuffled[first:]


def pictures(sources: Sources, count: int) -> Iterator[NDArray[np.uint8]]:
    """Yields ``count`` pictures [224, 224, 3], photographs and stamps in turn."""
    for index in range(count):
        random = np.random.default_rng((sources.seed, index))
        turn = index // 2
        if index % 2 == 0:
            image = _photograph(sources.photographs[turn % len(sources.photographs)], random)
        else:
            image = _stamp(sources.stamps[turn % len(sources.stamps)], random)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        yield np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))


def label(sources: Sources, index: int) -> int | None:
    """The ImageNet class of picture ``index`` of a set; None for a stamp."""
    if index % 2:
        return None
    return _class_of(sources.photographs[index // 2 % len(sources.photographs)])


def _photograph(path: Path, random: np.random.Generator) -> Image.Image:
    """A square of half the picture's shorter side or more, anywhere in it."""
    with Image.open(path) as image:
        width, height = image.size
        side = int(min(width, height) * random.uniform(0.5, 1))
        left, top = (int(random.integers(length - side + 1)) for length in (width, height))
        return image.convert("RGB").crop((left, top, left + side, top + side))


def _stamp(path: Path, random: np.random.Generator) -> Image.Image:
    """The whole object on a plain ground that is up to a third larger than it."""
    with Image.open(path) as image:
        stamp = image.convert("RGBA")
    side = int(max(stamp.size) * random.uniform(1, 4 / 3))
    ground = Image.new("RGBA", (side, side), (*random.integers(64, 208, 3).tolist(), 255))
    corner = [int(random.integers(side - length + 1)) for length in stamp.size]
    ground.alpha_composite(stamp, (corner[0], corner[1]))
    return ground.convert("RGB")


def labeled() -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yields the center of each photograph and its ImageNet class."""
    for path in fetch("imagenet-20"):
        with Image.open(path) as image:
            width, height = image.size
            side = int(min(width, height) * CENTER_SHARE)
            left, top = (width - side) // 2, (height - side) // 2
            center = image.convert("RGB").crop((left, top, left + side, top + side))
        resized = center.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
        yield np.asarray(resized), _class_of(path)


def _class_of(photograph: Path) -> int:
    """The ImageNet class is the end of the file's name."""
    return int(photograph.stem.rpartition("_")[2])


def preprocess(picture: NDArray[np.uint8], how: Preprocessing) -> NDArray[np.float32]:
    """Turns [224, 224, 3] into the network's input [3, 224, 224]."""
    offset, scale = (127, 128) if how is Preprocessing.CENTERED else IMAGENET
    pixels = (picture - np.asarray(offset)) / np.asarray(scale)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), np.float32)
