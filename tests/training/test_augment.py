from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slimctl.core.augmentations import AUGMENTATIONS, Augmentation, parse_augmentations
from slimctl.core.errors import OptionError

torch = pytest.importorskip("torch", reason="torch is not installed")

from slimctl.training.augment import FUNCTIONS, apply  # noqa: E402

EVERY = "flip,shift:2,crop:4,noise:0.02,erase:0.1,brightness:0.2"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one(text: str, images: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return apply(parse_augmentations(text), {"x": images}, generator(seed))["x"]


@pytest.fixture
def image() -> torch.Tensor:
    """One image of 2 channels; all its values are different and none is zero."""
    return torch.arange(1, 2 * 6 * 5 + 1, dtype=torch.float32).reshape(1, 2, 6, 5)


@pytest.fixture
def copies(image) -> torch.Tensor:
    return image.repeat(256, 1, 1, 1)


def distinct(images: torch.Tensor) -> list[np.ndarray]:
    """Different results among the samples of a batch."""
    return list(np.unique(images.numpy(), axis=0))


# Reading


def test_text_becomes_augmentations_and_text_again():
    found = parse_augmentations(" flip, shift:2 ,noise:0.02")
    assert found == (Augmentation("flip"), Augmentation("shift", 2), Augmentation("noise", 0.02))
    assert ",".join(map(str, found)) == "flip,shift:2,noise:0.02"
    assert ",".join(map(str, parse_augmentations(EVERY))) == EVERY
    assert parse_augmentations("") == parse_augmentations("  ") == ()


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("filp", "There is no augmentation 'filp'", "did you mean 'flip'?"),
        ("flip,zzz:2", "There is no augmentation 'zzz'", "brightness, crop, erase, flip, noise"),
        ("flip,", "There is no augmentation ''", "flip,shift:2"),
        ("flip:2", "'flip' takes no number, 'flip:2' has one", "write flip"),
        ("flip,flip", "'flip' is there more than once", "once"),
        ("shift", "'shift' does not say how much", "write for example shift:2"),
        ("shift:", "'shift:' does not say how much", "write for example shift:2"),
        ("shift:1.5", "takes a whole number of pixels from 1 to 64", "shift:2"),
        ("crop:0", "takes a whole number of pixels from 1 to 64", "crop:2"),
        ("crop:65", "takes a whole number of pixels from 1 to 64", "crop:2"),
        ("noise:-1", "takes a number from 0.0001 to 1", "noise:0.1"),
        ("erase:0.6", "takes a number from 0.001 to 0.5", "erase:0.1"),
        ("brightness:1", "takes a number from 0.001 to 0.9", "brightness:0.1"),
        ("brightness:nan", "'brightness:nan' does not say how much", "brightness:0.1"),
        ("noise:much", "'noise:much' does not say how much", "noise:0.1"),
    ],
)
def test_malformed_text(text, what, fix):
    with pytest.raises(OptionError) as caught:
        parse_augmentations(text)
    assert what in caught.value.what and fix in caught.value.fix
    assert caught.value.option == caught.value.where == "--augment"


def test_reading_imports_no_torch():
    code = "import sys, slimctl.core.augmentations; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "False"


def test_every_word_has_a_function():
    assert list(FUNCTIONS) == list(AUGMENTATIONS)


# What each does


def test_flip_mirrors_about_half_of_the_samples(image, copies):
    found = one("flip", copies)
    flipped = (found == image.flip(3)).all(3).all(2).all(1)
    kept = (found == image).all(3).all(2).all(1)
    assert (flipped | kept).all()
    assert 90 < int(flipped.sum()) < 166  # 128 +- 38, which is 4.8 deviations of 8


def moved(image: np.ndarray, rows: int, columns: int, mode: str) -> np.ndarray:
    padded = np.pad(image, ((0, 0), (0, 0), (2, 2), (2, 2)), mode=mode)
    height, width = image.shape[2:]
    return padded[:, :, 2 + rows : 2 + rows + height, 2 + columns : 2 + columns + width]


@pytest.mark.parametrize(("word", "mode"), [("shift:2", "edge"), ("crop:2", "constant")])
def test_moves_are_all_of_those_within_the_bound(image, copies, word, mode):
    """256 draws of 25 moves: one is left out with a chance below 25 * (24/25)^256 = 0.07 %."""
    offsets = range(-2, 3)
    wanted = [moved(image.numpy(), y, x, mode) for y in offsets for x in offsets]
    found = distinct(one(word, copies))
    assert len(found) == 25
    np.testing.assert_array_equal(np.unique(np.concatenate(wanted), axis=0), found)


def test_moves_farther_than_the_image(image, copies):
    assert torch.isin(one("shift:64", copies), image).all()
    cut = one("crop:64", copies)
    assert (cut.flatten(1).abs().sum(1) == 0).any()  # only padding is left


def test_noise_has_the_deviation_and_differs_by_sample():
    found = one("noise:0.02", torch.zeros(64, 3, 32, 32))
    assert found.std().item() == pytest.approx(0.02, rel=0.02)  # 196,608 values: 0.16 %
    assert abs(found.mean().item()) < 0.001
    assert len(distinct(found)) == 64


def test_erased_boxes():
    """What is erased is one box, filled with the mean of the channel."""
    images = torch.rand(256, 2, 24, 20, generator=generator(3))
    found = one("erase:0.25", images)
    changed = (found != images).any(1)
    sizes = changed.sum((1, 2))
    rows, columns = changed.any(2).sum(1), changed.any(1).sum(1)
    assert (sizes == rows * columns).all()
    assert 0.25 * 480 * 0.5 < sizes.max() <= 0.25 * 480 * 1.1  # sides are rounded
    assert len(set(sizes.tolist())) > 20
    filled = found[200][changed[200][None].expand(2, -1, -1)].reshape(2, -1)
    torch.testing.assert_close(filled, images[200].mean((1, 2))[:, None].expand_as(filled))


def test_boxes_lie_everywhere():
    images = torch.rand(2000, 1, 12, 12, generator=generator(5))
    share = (one("erase:0.2", images) != images).float().mean(0)[0]
    assert share.min() > 0.004 and share.max() < 0.3


def test_brightness_scales_around_the_darkest_value(image, copies):
    found = one("brightness:0.2", copies)
    darkest = image.amin((2, 3), keepdim=True)
    torch.testing.assert_close(found.amin((2, 3)), copies.amin((2, 3)))
    factors = ((found - darkest) / (image - darkest))[:, :, 1:]  # the first row has the darkest
    torch.testing.assert_close(factors, factors[:, :1, :1, :1].expand_as(factors))
    values = factors[:, 0, 0, 0]
    assert 0.8 <= values.min() < 0.82 and 1.18 < values.max() <= 1.2001


def test_brightness_does_not_depend_on_normalization(copies):
    plain, normalized = one("brightness:0.5", copies), one("brightness:0.5", (copies - 30) / 17)
    torch.testing.assert_close(normalized, (plain - 30) / 17, rtol=1e-4, atol=1e-4)


# All of them


@pytest.mark.parametrize("word", EVERY.split(","))
def test_every_sample_draws_for_itself_and_a_seed_decides(copies, word):
    before = copies.clone()
    found = one(word, copies, seed=1)
    assert len(distinct(found)) > 1
    torch.testing.assert_close(found, one(word, copies, seed=1), rtol=0, atol=0)
    assert not torch.equal(found, one(word, copies, seed=2))
    assert torch.equal(copies, before) and found.shape == copies.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_type_and_shape_stay(dtype):
    found = one(EVERY, torch.rand(4, 3, 9, 7, generator=generator()).to(dtype))
    assert found.dtype == dtype and found.shape == (4, 3, 9, 7)


def test_they_are_applied_in_order(copies):
    bright = one("brightness:0.5,noise:0.01", copies)
    noisy = one("noise:0.01,brightness:0.5", copies)
    assert not torch.equal(bright, noisy)


def test_only_images_are_changed(copies):
    feeds = {
        "x": copies,
        "rows": copies[:, 0],
        "pixels": copies.to(torch.uint8),
        "ids": torch.arange(256),
        "none": torch.empty(0, 3, 4, 4),
    }
    found = apply(parse_augmentations(EVERY), feeds, generator())
    assert list(found) == list(feeds)
    assert [name for name in feeds if found[name] is not feeds[name]] == ["x"]
    assert apply((), feeds, generator())["x"] is copies
