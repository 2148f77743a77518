"""How an image becomes a model input: presets as YAML data, and the user's own files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slimctl.core.errors import ConfigError, OptionError, SourceError, nearest
from slimctl.data.inputs import InputSpec

if TYPE_CHECKING:
    from PIL import Image

OPTION = "--preprocess"
DEFAULT_PLACE = "a preprocessing file"

Layout = Literal["NCHW", "NHWC"]
PositiveFloat = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0)]

_CHANNELS = {"RGB": 3, "BGR": 3, "L": 1}


class Preprocess(BaseModel):
    """One way to prepare images: ``(pixel / divisor - mean) / std`` after resizing.

    Images are decoded as stored; the orientation tag of photographs is not applied, as in the
    usual training pipelines.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    summary: str = Field("", description="One line for people.")
    size: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="Height and width, for models that do not fix them themselves."
    )
    resize: Literal["shortest", "stretch", "pad"] = Field(
        "shortest",
        description="shortest: shorter edge to size / crop_fraction, then the center is cut out;"
        " stretch: both edges to the size; pad: fit inside, fill the rest with pad_value.",
    )
    crop_fraction: float = Field(
        1.0, gt=0, le=1, description="Edge of the cut-out divided by the shorter resized edge."
    )
    interpolation: Literal["nearest", "box", "bilinear", "bicubic", "lanczos"] = "bilinear"
    pad_value: int = Field(0, ge=0, le=255, description="Pixel value beside the image for pad.")
    divisor: PositiveFloat = Field(255.0, description="Pixel values 0..255 are divided by this.")
    mean: tuple[float, ...] = Field((0.0,), description="Subtracted, one per channel or for all.")
    std: tuple[PositiveFloat, ...] = Field(
        (1.0,), description="Divided by, one per channel or for all."
    )
    channels: Literal["RGB", "BGR", "L"] = Field("RGB", description="Order; L is grayscale.")
    layout: Literal["NCHW", "NHWC", "auto"] = Field(
        "auto", description="auto: where the model's shape has as many entries as channels."
    )
    dtype: Literal["float32", "float16", "float64", "uint8"] | None = Field(
        None, description="Element type; by default the model's."
    )

    @model_validator(mode="after")
    def _one_or_all_channels(self) -> Self:
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, _CHANNELS[self.channels]):
                raise ValueError(f"{name} needs one value, or one per channel of {self.channels}")
        return self


def preset_names() -> list[str]:
    """Names of the built-in presets."""
    folder = resources.files("slimctl.data") / "presets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_preprocess(name_or_path: str) -> Preprocess:
    """A built-in preset by name, or a YAML file by path.

    Raises:
        OptionError: There is no such preset or file.
        ConfigError: The file does not follow the schema.
    """
    if name_or_path in preset_names():
        entry = resources.files("slimctl.data") / "presets" / f"{name_or_path}.yaml"
        return _parse(entry.read_text("utf-8"), name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise OptionError(
            OPTION,
            f"There is no preset and no file '{name_or_path}'",
            fix=f"{nearest(name_or_path, preset_names())} A path to a YAML file works too",
        )
    try:
        return _parse(path.read_text("utf-8"), name_or_path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The preprocessing file cannot be read: {error}",
            where=name_or_path,
            fix="give a readable YAML text file",
        ) from error


def _parse(text: str, place: str) -> Preprocess:
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The preprocessing file is no YAML: {error}", where=place, fix="correct the syntax"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            "The preprocessing file holds no fields",
            where=place,
            fix="write 'field: value' lines; fields: " + ", ".join(Preprocess.model_fields),
        )
    try:
        return Preprocess.model_validate(values)
    except ValidationError as error:
        raise _schema_error(error, place) from error


def _schema_error(error: ValidationError, place: str) -> ConfigError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    unknown = first["type"] == "extra_forbidden"
    what = f"Unknown field '{name}'" if unknown else f"Field '{name}': {first['msg']}"
    return ConfigError(
        what if name else first["msg"],
        where=place,
        fix=nearest(name, Preprocess.model_fields) if unknown else "correct the value",
    )


class ImageTransform(NamedTuple):
    """A preprocessing with everything decided that the model decides."""

    preprocess: Preprocess
    height: int
    width: int
    layout: Layout
    dtype: np.dtype[Any]

    def facts(self) -> dict[str, Any]:
        """The resolved settings, JSON types only."""
        values = self.preprocess.model_dump(mode="json", exclude={"summary"})
        return values | {
            "size": [self.height, self.width],
            "layout": self.layout,
            "dtype": self.dtype.name,
        }

    def apply(self, image: Image.Image) -> NDArray[Any]:
        """One image as a batch of one: [1, channels, height, width] or channels last."""
        grayscale = self.preprocess.channels == "L"
        pixels = np.asarray(self._resized(image.convert("L" if grayscale else "RGB")))
        pixels = pixels[:, :, None] if grayscale else pixels  # [height, width, channels]
        if self.preprocess.channels == "BGR":
            pixels = pixels[:, :, ::-1]
        values = self._normalized(pixels)
        if self.layout == "NCHW":
            values = values.transpose(2, 0, 1)
        return np.ascontiguousarray(values[None])

    def _normalized(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        if self.dtype.kind != "f":
            return pixels.astype(self.dtype)
        values = pixels.astype(np.float32)
        values /= np.float32(self.preprocess.divisor)
        values -= np.asarray(self.preprocess.mean, np.float32)
        values /= np.asarray(self.preprocess.std, np.float32)
        return values.astype(self.dtype, copy=False)

    def _resized(self, image: Image.Image) -> Image.Image:
        if self.preprocess.resize == "stretch":
            return self._scaled(image, self.width, self.height)
        if self.preprocess.resize == "pad":
            return self._padded(image)
        return self._center(image)

    def _scaled(self, image: Image.Image, width: int, height: int) -> Image.Image:
        from PIL import Image

        method = Image.Resampling[self.preprocess.interpolation.upper()]
        return image if image.size == (width, height) else image.resize((width, height), method)

    def _center(self, image: Image.Image) -> Image.Image:
        fraction = self.preprocess.crop_fraction
        # As torchvision's Resize(int): the shorter edge first, the other follows, rounded down.
        factor = max(
            int(self.width / fraction) / image.width, int(self.height / fraction) / image.height
        )
        width = max(int(image.width * factor + 1e-6), self.width)
        height = max(int(image.height * factor + 1e-6), self.height)
        scaled = self._scaled(image, width, height)
        left, top = round((width - self.width) / 2), round((height - self.height) / 2)
        return scaled.crop((left, top, left + self.width, top + self.height))

    def _padded(self, image: Image.Image) -> Image.Image:
        from PIL import Image

        factor = min(self.width / image.width, self.height / image.height)
        width = min(max(round(image.width * factor), 1), self.width)
        height = min(max(round(image.height * factor), 1), self.height)
        value = self.preprocess.pad_value
        color = value if image.mode == "L" else (value, value, value)
        canvas = Image.new(image.mode, (self.width, self.height), color)
        corner = ((self.width - width) // 2, (self.height - height) // 2)
        canvas.paste(self._scaled(image, width, height), corner)
        return canvas


def in_grayscale(preprocess: Preprocess, spec: InputSpec) -> Preprocess:
    """The preprocessing for images without colors: it makes none up for a model with one channel.

    What the preprocessing says about channels itself, in ``channels`` or by one mean for each,
    stays.
    """
    sizes = (spec.shape or ())[1:]
    one_channel = len(sizes) == 3 and 1 in (sizes[0], sizes[2]) and 3 not in (sizes[0], sizes[2])
    decided = "channels" in preprocess.model_fields_set
    if decided or not one_channel or len(preprocess.mean) + len(preprocess.std) > 2:
        return preprocess
    return preprocess.model_copy(update={"channels": "L"})


def resolve_transform(preprocess: Preprocess, spec: InputSpec, source: str) -> ImageTransform:
    """Decides size, layout and type from the model's input.

    Raises:
        SourceError: The input is no image.
        ConfigError: The preprocessing leaves something open that the model leaves open too, or
            contradicts the model.
    """
    shape = spec.shape
    if shape is None or len(shape) != 4:
        raise SourceError(
            source,
            f"Images cannot be fed to input '{spec.name}': {spec.text} has no batch, channel,"
            " height and width",
            fix="give arrays (.npz) or module:function",
        )
    layout = _layout(preprocess, spec)
    height, width = shape[2:] if layout == "NCHW" else shape[1:3]
    fallback = preprocess.size or (None, None)
    height = height if isinstance(height, int) else fallback[0]
    width = width if isinstance(width, int) else fallback[1]
    if height is None or width is None:
        raise ConfigError(
            f"Neither the model nor the preprocessing says how large images are ({spec.text})",
            where=f"input '{spec.name}'",
            fix=f"give {DEFAULT_PLACE} with 'size: [height, width]'",
        )
    return ImageTransform(preprocess, height, width, layout, _dtype(preprocess, spec))


def _layout(preprocess: Preprocess, spec: InputSpec) -> Layout:
    if preprocess.layout != "auto":
        return preprocess.layout
    shape = spec.shape or ()
    channels = _CHANNELS[preprocess.channels]
    first, last = shape[1] == channels, shape[3] == channels
    if first == last:
        raise ConfigError(
            f"The shape of input '{spec.name}' does not tell which axis holds the {channels}"
            f" channels: {spec.text}",
            where=f"input '{spec.name}'",
            fix=f"give {DEFAULT_PLACE} with 'layout: NCHW' or 'layout: NHWC', and 'channels'",
        )
    return "NCHW" if first else "NHWC"


def _dtype(preprocess: Preprocess, spec: InputSpec) -> np.dtype[Any]:
    dtype = np.dtype(preprocess.dtype) if preprocess.dtype else spec.dtype.numpy()
    unchanged = (preprocess.divisor, set(preprocess.mean), set(preprocess.std)) == (1, {0}, {1})
    if dtype.kind != "f" and not unchanged:
        raise ConfigError(
            f"Normalized values do not fit the type {dtype.name} of input '{spec.name}'",
            where=f"input '{spec.name}'",
            fix=f"use {OPTION} raw, or divisor 1, mean 0 and std 1",
        )
    return dtype
