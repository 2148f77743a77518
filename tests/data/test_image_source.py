from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slimctl.core.errors import (
    ConfigError,
    MissingExtraError,
    OptionError,
    SampleError,
    SourceError,
)
from slimctl.data.inputs import InputSpec
from slimctl.data.preprocess import Preprocess, load_preprocess, preset_names, resolve_transform
from slimctl.data.sources import open_source

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

FLOAT, UINT8 = ir.DataType.FLOAT, ir.DataType.UINT8


@pytest.fixture
def classifier(interface):
    return interface(("x", FLOAT, ("N", 3, 224, 224)))


def draw(path: Path, seed: int = 0, size: tuple[int, int] = (300, 260), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], bands), np.uint8)
    Image.fromarray(pixels.squeeze(), mode if bands == 1 else None).convert(mode).save(path)
    return path


@pytest.fixture
def photos(tmp_path):
    for index in range(12):
        draw(tmp_path / "photos" / f"photo{index}.png", index)
    return tmp_path / "photos"


def spec_of(interface) -> InputSpec:
    return InputSpec(*interface.inputs[0])


def test_imagenet_preset_by_hand(photos, classifier):
    """The same steps written out, as torchvision documents them."""
    source = open_source(str(photos), interface=classifier, preprocess="imagenet")
    got = next(source.batches()).feeds["x"]
    image = Image.open(photos / "photo0.png")  # 300 x 260: shorter edge to 256
    image = image.resize((int(300 * 256 / 260), 256), Image.Resampling.BILINEAR)
    left, top = round((image.width - 224) / 2), (256 - 224) // 2
    pixels = np.asarray(image.crop((left, top, left + 224, top + 224)), np.float64) / 255
    wanted = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(got[0], wanted.transpose(2, 0, 1), atol=1e-6)
    assert got.dtype == np.float32 and got.shape == (1, 3, 224, 224) and got.flags.c_contiguous


def test_tensorflow_preset_by_hand(photos, interface):
    model = interface(("x", FLOAT, ("N", 224, 224, 3)))  # channels last
    got = next(open_source(str(photos), interface=model, preprocess="imagenet-tf").batches()).feeds[
        "x"
    ]
    image = Image.open(photos / "photo0.png").resize((295, 256), Image.Resampling.BICUBIC)
    pixels = np.asarray(image.crop((36, 16, 260, 240)), np.float64)
    np.testing.assert_allclose(got[0], (pixels - 127) / 128, atol=1e-6)


def test_zero_to_one_preset_stretches(photos, interface):
    model = interface(("x", FLOAT, (1, 3, 32, 64)))
    got = next(open_source(str(photos), interface=model, preprocess="0-1").batches()).feeds["x"]
    image = Image.open(photos / "photo0.png").resize((64, 32), Image.Resampling.BILINEAR)
    np.testing.assert_allclose(got[0], np.asarray(image).transpose(2, 0, 1) / 255, atol=1e-6)


def test_raw_preset_keeps_integers(photos, interface):
    model = interface(("x", UINT8, (1, 32, 32, 3)))
    got = next(open_source(str(photos), interface=model, preprocess="raw").batches()).feeds["x"]
    image = Image.open(photos / "photo0.png").resize((32, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(got[0], np.asarray(image))
    with pytest.raises(ConfigError, match="do not fit the type uint8") as caught:
        open_source(str(photos), interface=model, preprocess="imagenet")
    assert "raw" in caught.value.fix


def test_images_are_batched_in_natural_order(photos, classifier):
    source = open_source(str(photos), interface=classifier, preprocess="imagenet", batch_size=5)
    batches = list(source.batches())
    assert [batch.feeds["x"].shape[0] for batch in batches] == [5, 5, 2]
    single = open_source(str(photos), interface=classifier, preprocess="imagenet")
    np.testing.assert_array_equal(
        np.concatenate([b.feeds["x"] for b in batches]),
        np.concatenate([b.feeds["x"] for b in single.batches()]),
    )
    tenth = Preprocess(summary="").model_copy(update=load_preprocess("imagenet").model_dump())
    transform = resolve_transform(tenth, spec_of(classifier), "")
    np.testing.assert_array_equal(
        batches[2].feeds["x"][:1], transform.apply(Image.open(photos / "photo10.png"))
    )


def test_fixed_batch_of_images(photos, interface):
    model = interface(("x", FLOAT, (5, 3, 16, 16)))
    source = open_source(str(photos), interface=model, preprocess="0-1")
    assert [batch.feeds["x"].shape for batch in source.batches()] == [(5, 3, 16, 16)] * 2
    described = source.describe()
    assert (described["samples"], described["dropped"]) == (10, 2)
    assert described["preprocess"]["size"] == [16, 16]
    assert described["preprocess"]["layout"] == "NCHW"


def test_counts_are_known_without_decoding(photos, interface):
    model = interface(("x", FLOAT, (5, 3, 16, 16)))
    fresh = open_source(str(photos), interface=model, preprocess="0-1").describe()
    source = open_source(str(photos), interface=model, preprocess="0-1")
    list(source.batches())
    assert source.describe() == fresh


def test_hash_covers_files_order_and_preprocessing(photos, classifier):
    def digest(**options):
        options = {"preprocess": "imagenet"} | options
        return open_source(str(photos), interface=classifier, **options).content_hash()

    base = digest()
    assert digest() == base
    assert digest(preprocess="0-1") != base
    assert digest(samples=11) != base
    draw(photos / "photo11.png", 99)
    assert digest() != base
    assert digest(samples=11) == digest(samples=11)


@pytest.mark.parametrize(
    ("names", "labels"),
    [(["cat", "bird", "dog"], [0, 1, 2]), (["10", "2", "207"], [2, 10, 207])],
)
def test_class_folders_give_labels_and_take_turns(tmp_path, interface, names, labels):
    model = interface(("x", FLOAT, ("N", 3, 8, 8)))
    for index, name in enumerate(names):
        for number in range(3 + index):
            draw(tmp_path / "set" / name / f"{number}.png", size=(9, 9))
    source = open_source(str(tmp_path / "set"), interface=model, preprocess="0-1")
    assert source.labeled and source.sample_count == 12
    found = [int(batch.labels[0]) for batch in source.batches()]
    assert found[:6] == labels + labels
    assert sorted(set(found)) == labels


def test_images_beside_class_folders(photos, classifier):
    draw(photos / "cat" / "0.png")
    with pytest.raises(SourceError, match="both in the folder and in its class folders"):
        open_source(str(photos), interface=classifier, preprocess="imagenet")


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("L", "png"), ("RGBA", "png"), ("P", "png"), ("1", "png"), ("CMYK", "tif"), ("P", "gif")],
)
def test_every_kind_of_image_becomes_rgb(tmp_path, interface, mode, suffix):
    Image.new("RGB", (20, 20), (250, 20, 20)).convert(mode).save(tmp_path / f"a.{suffix}")
    model = interface(("x", FLOAT, ("N", 3, 8, 8)))
    got = next(open_source(str(tmp_path), interface=model, preprocess="0-1").batches()).feeds["x"]
    assert got.shape == (1, 3, 8, 8)


def test_preprocessing_is_never_guessed(photos, classifier):
    with pytest.raises(OptionError) as caught:
        open_source(str(photos), interface=classifier)
    assert all(name in caught.value.fix for name in preset_names())


def test_presets():
    assert preset_names() == ["0-1", "fashion-mnist", "imagenet", "imagenet-tf", "raw"]
    assert all(load_preprocess(name).summary for name in preset_names())


def test_unknown_preset_names_the_nearest(photos, classifier):
    with pytest.raises(OptionError) as caught:
        open_source(str(photos), interface=classifier, preprocess="imagnet")
    assert "'imagenet'" in caught.value.fix


def test_own_preprocessing_file(photos, tmp_path, interface):
    model = interface(("x", FLOAT, ("N", 1, "H", "W")))
    file = tmp_path / "mine.yaml"
    file.write_text(
        "size: [32, 48]\nresize: pad\npad_value: 100\nchannels: L\n"
        "divisor: 1\nmean: [100]\nstd: [2]\ninterpolation: nearest\n"
    )
    got = next(open_source(str(photos), interface=model, preprocess=str(file)).batches()).feeds["x"]
    # 300 x 260 into 48 x 32: 37 x 32, and 5 columns left of it are filling.
    assert got.shape == (1, 1, 32, 48)
    assert (got[..., :5] == 0).all() and (got[..., 42:] == 0).all() and got[..., 5:42].any()
    image = (
        Image.open(photos / "photo0.png").convert("L").resize((37, 32), Image.Resampling.NEAREST)
    )
    np.testing.assert_allclose(got[0, 0, :, 5:42], (np.asarray(image, np.float32) - 100) / 2)


def test_blue_first(tmp_path, interface):
    Image.new("RGB", (8, 8), (255, 0, 51)).save(tmp_path / "a.png")
    (tmp_path / "bgr.yaml").write_text("channels: BGR\nresize: stretch\n")
    model = interface(("x", FLOAT, ("N", 3, 8, 8)))
    source = open_source(str(tmp_path), interface=model, preprocess=str(tmp_path / "bgr.yaml"))
    np.testing.assert_allclose(
        next(source.batches()).feeds["x"][0, :, 0, 0], [0.2, 0, 1], atol=1e-7
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sizes: [3, 4]", "Unknown field 'sizes'.*did you mean 'size'"),
        ("std: [0]", "'std.0'.*greater than 0"),
        ("mean: [1, 2]", "one value, or one per channel of RGB"),
        ("resize: squash", "'resize'"),
        ("- a list", "holds no fields"),
        ("a: [", "is no YAML"),
        ("", "holds no fields"),
    ],
)
def test_malformed_preprocessing_file(photos, tmp_path, classifier, text, expected):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){expected}") as caught:
        open_source(str(photos), interface=classifier, preprocess=str(file))
    assert str(file) in str(caught.value) and caught.value.fix


def test_open_size_must_be_given_somewhere(photos, interface):
    model = interface(("x", FLOAT, ("N", 3, "H", "W")))
    with pytest.raises(ConfigError, match="how large images are"):
        open_source(str(photos), interface=model, preprocess="0-1")
    source = open_source(str(photos), interface=model, preprocess="imagenet")
    assert next(source.batches()).feeds["x"].shape == (1, 3, 224, 224)


def test_layout_must_be_recognizable(photos, interface):
    with pytest.raises(ConfigError, match="which axis holds the 3 channels"):
        open_source(str(photos), interface=interface(("x", FLOAT, (1, 3, 8, 3))), preprocess="0-1")


def test_input_that_is_no_image(photos, interface):
    with pytest.raises(SourceError, match="Images cannot be fed to input 'x'"):
        open_source(str(photos), interface=interface(("x", FLOAT, ("N", 7))), preprocess="0-1")
    two = interface(("x", FLOAT, ("N", 3, 8, 8)), ("y", FLOAT, ("N",)))
    with pytest.raises(SourceError, match="2 inputs"):
        open_source(str(photos), interface=two, preprocess="0-1")


def test_channels_that_do_not_fit(photos, tmp_path, interface):
    (tmp_path / "mine.yaml").write_text("layout: NCHW\nchannels: L\n")
    model = interface(("x", FLOAT, ("N", 3, 8, 8)))
    with pytest.raises(SampleError) as caught:
        open_source(str(photos), interface=model, preprocess=str(tmp_path / "mine.yaml"))
    assert caught.value.found == "shape [1,1,8,8]" and "photo0.png" in caught.value.sample


@pytest.mark.parametrize("damage", ["truncate", "text", "empty"])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_damaged_image_is_named(photos, classifier, damage, suffix):
    path = draw(photos / f"photo3.{suffix}")
    data = {"truncate": path.read_bytes()[:500], "text": b"no image", "empty": b""}[damage]
    path.write_bytes(data)
    source = open_source(str(photos), interface=classifier, preprocess="imagenet")
    with pytest.raises(SourceError) as caught:
        list(source.batches())
    assert caught.value.source == str(path)


def test_without_pillow(photos, classifier, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"slimctl\[data\]"):
        open_source(str(photos), interface=classifier, preprocess="imagenet")


def test_pillow_is_imported_late():
    code = (
        "import sys, slimctl.data.sources\n"
        "print([m for m in ('PIL', 'onnxruntime', 'torch') if m in sys.modules])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip() == "[]"
