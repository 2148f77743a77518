"""How augmentations of images are written: ``flip,shift:2,noise:0.02``. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from slimctl.core.errors import OptionError, nearest

OPTION = "--augment"


class AugmentationKind(NamedTuple):
    """One word of the text.

    Attributes:
        summary: What it does to one image; every image of a batch draws for itself.
        low: Least amount; equal to ``high`` where the word takes none.
        high: Largest amount.
        whole: The amount counts pixels.
    """

    summary: str
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @property
    def takes_amount(self) -> bool:
        """Whether a number follows the word."""
        return self.high > self.low

    @property
    def bounds(self) -> str:
        """What the amount may be, for messages."""
        kind = "a whole number of pixels" if self.whole else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}"


AUGMENTATIONS = {
    "flip": AugmentationKind("mirrored left to right, every second time"),
    # 64 pixels: more than half of any image that is augmented this way has left the frame.
    "shift": AugmentationKind("moved by up to so many pixels, edges repeated", 1, 64, True),
    "crop": AugmentationKind("cut out of itself with so many zeros around", 1, 64, True),
    # Values of a normalized image have a deviation of 1: nothing is left of it beyond.
    "noise": AugmentationKind("normal noise of this deviation added", 0.0001, 1),
    "erase": AugmentationKind("a box of up to this share of the area made plain", 0.001, 0.5),
    "brightness": AugmentationKind("brighter or darker by up to this share", 0.001, 0.9),
}
"""The words, in the order of the documentation."""


@dataclass(frozen=True)
class Augmentation:
    """One change of images.

    Attributes:
        name: A key of :data:`AUGMENTATIONS`.
        amount: How much; 0 where the word takes no number.
    """

    name: str
    amount: float = 0.0

    def __str__(self) -> str:
        takes_amount = AUGMENTATIONS[self.name].takes_amount
        return f"{self.name}:{self.amount:g}" if takes_amount else self.name


def parse_augmentations(text: str) -> tuple[Augmentation, ...]:
    """Augmentations in the order in which they are applied; none from an empty text.

    Raises:
        OptionError: An unknown word, one named twice, or an amount out of its bounds.
    """
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    found = tuple(_augmentation(item) for item in items)
    for index, augmentation in enumerate(found):
        if any(other.name == augmentation.name for other in found[:index]):
            raise OptionError(
                OPTION,
                f"'{augmentation.name}' is there more than once",
                fix="name each augmentation once",
            )
    return found


def _augmentation(item: str) -> Augmentation:
    name, colon, amount = item.partition(":")
    if name not in AUGMENTATIONS:
        raise OptionError(
            OPTION,
            f"There is no augmentation '{name}'",
            fix=f"{nearest(name, AUGMENTATIONS)} Write for example flip,shift:2",
        )
    kind = AUGMENTATIONS[name]
    if kind.takes_amount:
        return Augmentation(name, _amount(item, kind, amount))
    if colon:
        raise OptionError(
            OPTION, f"'{name}' takes no number, '{item}' has one", fix=f"write {name}"
        )
    return Augmentation(name)


def _amount(item: str, kind: AugmentationKind, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    # Written this way round NaN is out of bounds, too.
    if not kind.low <= amount <= kind.high or (kind.whole and amount != int(amount)):
        name = item.partition(":")[0]
        raise OptionError(
            OPTION,
            f"'{item}' does not say how much: {name} takes {kind.bounds}",
            fix=f"write for example {name}:{2 if kind.whole else 0.1}",
        )
    return amount
