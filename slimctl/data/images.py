"""Folders of images, and what all sources of images share.

Pillow is imported when the first source of images is opened, not before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.core.errors import MissingExtraError, OptionError, SourceError
from slimctl.core.files import sha256_of_file
from slimctl.data.batch import Chunk
from slimctl.data.folders import children, fixed_axis_0
from slimctl.data.inputs import InputSpec, check_feeds
from slimctl.data.npz import reading
from slimctl.data.preprocess import (
    OPTION,
    ImageTransform,
    load_preprocess,
    preset_names,
    resolve_transform,
)

IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)


class ImageFile(NamedTuple):
    """One image and its class, None when the folder has no classes."""

    path: Path
    label: int | None


def is_image(path: Path) -> bool:
    """Whether a file is an image by its name."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def find_images(folder: Path) -> list[ImageFile]:
    """The images of a folder in natural order, or of its class folders in turn.

    Class folders named by numbers are the labels; other names are numbered in alphabetical order,
    as torchvision does. One image of each class comes first, then the second of each, so that the
    first N samples hold all classes.

    Raises:
        SourceError: A folder cannot be read, or images lie both beside and in class folders.
    """
    entries = children(folder)
    images = [ImageFile(path, None) for path in entries if is_image(path)]
    classes = {
        path.name: found
        for path in entries
        if path.is_dir() and (found := [file for file in children(path) if is_image(file)])
    }
    if images and classes:
        raise SourceError(
            str(folder),
            "Images lie both in the folder and in its class folders",
            fix="give a folder with one or the other",
        )
    return images or _in_turn(classes)


def _in_turn(classes: dict[str, list[Path]]) -> list[ImageFile]:
    numbered = all(name.isdecimal() for name in classes)
    names = sorted(classes, key=int) if numbered else sorted(classes)
    labels = {name: int(name) if numbered else index for index, name in enumerate(names)}
    columns = [[ImageFile(path, labels[name]) for path in classes[name]] for name in names]
    return [image for turn in zip_longest(*columns) for image in turn if image is not None]


def pillow() -> Any:
    """Pillow's module ``Image``.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("data", "Reading images") from error
    return Image


def required_preprocess(preprocess: str | None, holder: str) -> str:
    """The value of ``--preprocess``, which images need.

    Args:
        preprocess: What was given.
        holder: What holds the images, such as ``A folder of images``.

    Raises:
        OptionError: Nothing was given.
    """
    if preprocess is None:
        raise OptionError(
            OPTION,
            f"{holder} needs to know how images are prepared for the model",
            fix=f"give a preset ({', '.join(preset_names())}) or a YAML file",
        )
    return preprocess


def image_input(specs: Sequence[InputSpec], source: str, holder: str) -> InputSpec:
    """The only input of a model.

    Raises:
        SourceError: The model has several inputs, or none.
    """
    if len(specs) != 1:
        raise SourceError(
            source,
            f"The model has {len(specs)} inputs, {holder[0].lower()}{holder[1:]} fills one",
            fix="give arrays (.npz) or module:function",
        )
    return specs[0]


def one_sample(spec: InputSpec) -> InputSpec:
    """What one image is checked against, before images are put together along axis 0."""
    return spec._replace(shape=(None, *(spec.shape or ())[1:]))


def decoded(image_file: Path | IO[bytes], transform: ImageTransform, place: str) -> NDArray[Any]:
    """One image as a batch of one.

    Raises:
        SourceError: It cannot be read.
    """
    library = pillow()
    try:
        with reading(place), library.open(image_file) as image:
            return transform.apply(image)
    except (SyntaxError, library.DecompressionBombError) as error:
        # Pillow's PNG reader reports damage as SyntaxError.
        raise SourceError(
            place, f"The image cannot be decoded: {error}", fix="replace or remove it"
        ) from error


_HOLDER = "A folder of images"


class ImageReader:
    """A folder of images for a model with one image input."""

    kind = "images"
    batched = False
    mergeable = True
    takes_images = True

    def __init__(self, folder: Path, specs: Sequence[InputSpec], *, preprocess: str | None) -> None:
        self._preprocess = required_preprocess(preprocess, _HOLDER)
        self._spec = image_input(specs, str(folder), _HOLDER)
        self._image = pillow()
        self._transform = resolve_transform(
            load_preprocess(self._preprocess), self._spec, str(folder)
        )
        self._files = find_images(folder)
        self.fixed_batch = fixed_axis_0(specs)
        self.sample_count: int | None = len(self._files)
        self.labeled = bool(self._files) and self._files[0].label is not None

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per image."""
        for file in self._files:
            place = str(file.path)
            feeds = {self._spec.name: decoded(file.path, self._transform, place)}
            check_feeds(feeds, [one_sample(self._spec)], place)
            labels = None if file.label is None else np.array([file.label])
            yield Chunk(feeds, labels, place, divisible=True)

    def facts(self) -> dict[str, Any]:
        """The resolved preprocessing and the decoder's version."""
        settings = {"name": self._preprocess, **self._transform.facts()}
        return {"preprocess": settings, "pillow": self._image.__version__}

    def fingerprint(self, samples: int) -> str | None:
        """Files, labels and preprocessing decide the arrays: decoding twice is not needed."""
        digest = hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode())
        for file in self._files[:samples]:
            with reading(str(file.path)):
                digest.update(f"{sha256_of_file(file.path)} {file.label}\n".encode())
        return digest.hexdigest()
