"""Folders of images. Pillow is imported when the first folder is opened, not before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimctl.core.errors import MissingExtraError, OptionError, SourceError
from slimctl.core.files import sha256_of_file
from slimctl.data.batch import Chunk
from slimctl.data.folders import children, fixed_axis_0
from slimctl.data.inputs import InputSpec, check_feeds
from slimctl.data.npz import reading
from slimctl.data.preprocess import OPTION, load_preprocess, preset_names, resolve_transform

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


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("data", "Reading images") from error
    return Image


class ImageReader:
    """A folder of images for a model with one image input."""

    kind = "images"
    batched = False
    mergeable = True

    def __init__(self, folder: Path, specs: Sequence[InputSpec], *, preprocess: str | None) -> None:
        if preprocess is None:
            raise OptionError(
                OPTION,
                "A folder of images needs to know how images are prepared for the model",
                fix=f"give a preset ({', '.join(preset_names())}) or a YAML file",
            )
        if len(specs) != 1:
            raise SourceError(
                str(folder),
                f"The model has {len(specs)} inputs, a folder of images fills one",
                fix="give arrays (.npz) or module:function",
            )
        self._image = _pillow()
        self._specs = specs
        self._preprocess = preprocess
        self._transform = resolve_transform(load_preprocess(preprocess), specs[0], str(folder))
        self._files = find_images(folder)
        self.fixed_batch = fixed_axis_0(specs)
        # One image at a time is checked, before images are put together along axis 0.
        self._sample_specs = [
            spec._replace(shape=(None, *(spec.shape or ())[1:])) for spec in specs
        ]
        self.sample_count: int | None = len(self._files)
        self.labeled = bool(self._files) and self._files[0].label is not None

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per image."""
        for file in self._files:
            feeds = {self._specs[0].name: self._decoded(file.path)}
            check_feeds(feeds, self._sample_specs, str(file.path))
            labels = None if file.label is None else np.array([file.label])
            yield Chunk(feeds, labels, str(file.path), divisible=True)

    def _decoded(self, path: Path) -> NDArray[Any]:
        try:
            with reading(str(path)), self._image.open(path) as image:
                return self._transform.apply(image)
        except (SyntaxError, self._image.DecompressionBombError) as error:
            # Pillow's PNG reader reports damage as SyntaxError.
            raise SourceError(
                str(path), f"The image cannot be decoded: {error}", fix="replace or remove it"
            ) from error

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
