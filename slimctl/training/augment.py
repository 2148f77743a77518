"""Augments batches of images: every sample draws its own values, without a loop over samples.

Images are [N,C,H,W]. Draws come from one generator on its own device, so that a seed decides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slimctl.core.augmentations import Augmentation

_LEAST_ASPECT = 0.3
"""Sides of an erased box are at most 1 : 3.3 (Zhong et al., Random Erasing, AAAI 2020, table 1)."""


def apply(
    augmentations: Sequence[Augmentation], feeds: Mapping[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """Feeds with their images augmented; what is no float tensor of rank 4 stays as it is.

    Args:
        augmentations: Applied in this order.
        feeds: Left unchanged.
        generator: Makes the draws.
    """
    return {
        name: _augmented(augmentations, tensor, generator) if _holds_images(tensor) else tensor
        for name, tensor in feeds.items()
    }


def _holds_images(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_floating_point() and tensor.numel() > 0


def _augmented(
    augmentations: Sequence[Augmentation], images: Tensor, generator: torch.Generator
) -> Tensor:
    for augmentation in augmentations:
        images = FUNCTIONS[augmentation.name](images, augmentation.amount, generator)
    return images


def flip(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Mirrors each image left to right with probability 1/2."""
    del amount
    mirrored = _uniform(images, generator) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(3), images)


def shift(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Moves each image by whole pixels in -amount..amount along both axes; edges are repeated."""
    rows, columns = (_moved(images, axis, amount, generator) for axis in (2, 3))
    return _gathered(images, rows, columns)


def crop(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Pads each image with zeros and cuts it out anywhere (He et al., CVPR 2016, section 4.2).

    Zero is the mean of normalized images.
    """
    rows, columns = (_moved(images, axis, amount, generator) for axis in (2, 3))
    inside = _box(_within(rows, images.shape[2]), _within(columns, images.shape[3]))
    return _gathered(images, rows, columns).masked_fill(~inside, 0)


def noise(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Adds normal noise with the deviation ``amount``, in units of the model's input."""
    drawn = torch.randn(images.shape, generator=generator, device=generator.device)
    return images + amount * drawn.to(images)


def erase(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Fills a box of each image with the mean of the image's channel.

    Its share of the area is uniform in 0..amount, the logarithm of its height / width uniform in
    log 0.3..log 1/0.3 (Zhong et al., AAAI 2020).
    """
    height, width = images.shape[2:]
    area = _uniform(images, generator) * amount * height * width
    aspect = torch.exp(math.log(_LEAST_ASPECT) * (1 - 2 * _uniform(images, generator)))
    inside = _box(
        _span(images, 2, torch.sqrt(area * aspect), generator),
        _span(images, 3, torch.sqrt(area / aspect), generator),
    )
    return torch.where(inside, images.mean((2, 3), keepdim=True), images)


def brightness(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Scales each image by a factor in 1-amount..1+amount around the darkest value of each channel.

    With black in the image that is a scaling of its pixels, however they were normalized since.
    """
    factor = 1 + amount * (2 * _uniform(images, generator) - 1)
    darkest = images.amin((2, 3), keepdim=True)
    return darkest + (images - darkest) * factor[:, None, None, None].to(images.dtype)


FUNCTIONS: dict[str, Callable[[Tensor, float, torch.Generator], Tensor]] = {
    "flip": flip,
    "shift": shift,
    "crop": crop,
    "noise": noise,
    "erase": erase,
    "brightness": brightness,
}
"""What each word of :data:`slimctl.core.augmentations.AUGMENTATIONS` does."""


def _uniform(images: Tensor, generator: torch.Generator) -> Tensor:
    """One value in 0..1 for each image."""
    drawn = torch.rand(len(images), generator=generator, device=generator.device)
    return drawn.to(images.device)


def _moved(images: Tensor, axis: int, amount: float, generator: torch.Generator) -> Tensor:
    """Where each image reads its positions along an axis from: [N, size], maybe outside of it."""
    most = int(amount)
    offset = (_uniform(images, generator) * (2 * most + 1)).long() - most
    return torch.arange(images.shape[axis], device=images.device) + offset[:, None]


def _gathered(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Images [N,C,H,W] read at rows [N,H] and columns [N,W]; the nearest edge where outside."""
    rows = rows.clamp(0, images.shape[2] - 1)[:, None, :, None].expand_as(images)
    columns = columns.clamp(0, images.shape[3] - 1)[:, None, None, :].expand_as(images)
    return images.gather(2, rows).gather(3, columns)


def _within(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)


def _span(images: Tensor, axis: int, length: Tensor, generator: torch.Generator) -> Tensor:
    """A stretch of about this length anywhere along an axis of each image: booleans [N, size]."""
    size = images.shape[axis]
    rounded = length.round().clamp(max=size)
    start = (_uniform(images, generator) * (size - rounded + 1)).floor()[:, None]
    positions = torch.arange(size, device=images.device)
    return (positions >= start) & (positions < start + rounded[:, None])


def _box(rows: Tensor, columns: Tensor) -> Tensor:
    """Pairs of marked rows [N,H] and columns [N,W]: booleans [N,1,H,W]."""
    return (rows[:, :, None] & columns[:, None, :])[:, None]
