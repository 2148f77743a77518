"""Seeded inputs for the real models, close to what each of them meets in use."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from demo.pages import ANGLES, HEIGHT, WIDTH, draw_pages, draw_words

Feeds: TypeAlias = dict[str, NDArray[Any]]
Samples = Callable[[Path, Sequence[Path], int], Iterator[Feeds]]
"""From a model file, font files and a seed to an endless row of feeds."""

IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)


def _planes(image: Image.Image, mean: Any, std: Any) -> NDArray[np.float32]:
    pixels = np.asarray(image.convert("RGB"), np.float32) / 255  # [h, w, 3]
    planes: NDArray[Any] = ((pixels - mean) / std).transpose(2, 0, 1)
    return planes[np.newaxis].astype(np.float32)


def pages(model: Path, fonts: Sequence[Path], seed: int) -> Iterator[Feeds]:
    """Whole pages for the orientation model: short side 256, center 224 x 224."""
    del model
    for page, _ in draw_pages(10**6, seed, fonts):
        scale = 256 / min(page.size)
        width, height = (round(size * scale) for size in page.size)
        left, top = (width - 224) // 2, (height - 224) // 2
        small = page.resize((width, height), Image.Resampling.BICUBIC)
        yield {
            "x": _planes(
                small.crop((left, top, left + 224, top + 224)), IMAGENET_MEAN, IMAGENET_STD
            )
        }


def page_maps(model: Path, fonts: Sequence[Path], seed: int) -> Iterator[Feeds]:
    """Parts of upright pages for the text detector, of sides that are multiples of 32."""
    del model
    random = Random(seed)
    for page, label in draw_pages(10**6, seed, fonts):
        upright = page.rotate(ANGLES[label], expand=True)
        width, height = 32 * random.randint(8, 9), 32 * random.randint(8, 12)
        left, top = random.randint(0, WIDTH - 2 * width), random.randint(0, HEIGHT - 2 * height)
        part = upright.crop((left, top, left + 2 * width, top + 2 * height))
        yield {"x": _planes(part.resize((width, height), Image.Resampling.BILINEAR), 0.5, 0.5)}


def draw_line(random: Random, fonts: Sequence[Path]) -> tuple[Image.Image, str]:
    """One line of text, 48 pixels high and as wide as it needs, and the text."""
    font = ImageFont.truetype(str(random.choice(fonts)), random.randint(26, 34))
    text = draw_words(random, random.randint(2, 4))
    paper = random.randint(200, 255)
    line = Image.new("L", (int(font.getlength(text)) + 16, 48), paper)
    ImageDraw.Draw(line).text((8, 24), text, fill=random.randint(0, 80), font=font, anchor="lm")
    return line.convert("RGB"), text


def written_lines(fonts: Sequence[Path], seed: int) -> Iterator[tuple[NDArray[np.float32], str]]:
    """Lines of text of different widths, [1, 3, 48, width], and what is written there."""
    random = Random(seed)
    while True:
        line, text = draw_line(random, fonts)
        yield _planes(line, 0.5, 0.5), text


def lines(model: Path, fonts: Sequence[Path], seed: int) -> Iterator[Feeds]:
    """Lines of text for the recognizer."""
    del model
    for planes, _ in written_lines(fonts, seed):
        yield {"x": planes}


def turned_lines(model: Path, fonts: Sequence[Path], seed: int) -> Iterator[Feeds]:
    """Lines in a frame of 192 x 48, every other one upside down, for the text classifier."""
    del model
    random = Random(seed)
    while True:
        for angle in (0, 180):
            line = draw_line(random, fonts)[0].rotate(angle)
            planes = _planes(line.resize((min(line.width, 192), 48)), 0.5, 0.5)
            missing = 192 - planes.shape[3]
            yield {"x": np.pad(planes, ((0, 0), (0, 0), (0, 0), (0, missing)))}


def voice(random: np.random.Generator, seconds: float, rate: int) -> NDArray[np.float64]:
    """Syllables of a harmonic voice between pauses, over a little noise."""
    time = np.arange(int(seconds * rate)) / rate
    pitch = 120 + 40 * np.sin(2 * np.pi * random.uniform(0.2, 0.6) * time)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    formants = random.uniform(300, 2500, size=3)
    harmonics = np.arange(1, 20)
    distances = harmonics * 140 - formants[:, np.newaxis]  # Hz, [formants, harmonics]
    voice = np.exp(-(distances**2) / 2e5).sum(axis=0) @ np.sin(np.outer(harmonics, phase))
    syllables = np.clip(np.sin(2 * np.pi * random.uniform(2, 4) * time), 0, None)
    speaking = np.sin(2 * np.pi * 0.4 * time + random.uniform(0, 6)) > -0.2
    signal: NDArray[np.float64] = 0.1 * voice * syllables * speaking
    return signal + 0.003 * random.standard_normal(time.size)


def voice_chunks(model: Path, fonts: Sequence[Path], seed: int) -> Iterator[Feeds]:
    """Chunks of 32 ms at 16 kHz, each with the state that the model left after the one before.

    Neighbors are much alike, so that every eighth is taken.
    """
    del fonts
    session, random = ort.InferenceSession(str(model)), np.random.default_rng(seed)
    rate = np.array(16000, np.int64)
    while True:
        signal = voice(random, 4, 16000).astype(np.float32)
        state, context = np.zeros((2, 1, 128), np.float32), np.zeros(64, np.float32)
        for index in range(signal.size // 512):
            chunk = np.concatenate([context, signal[512 * index : 512 * (index + 1)]])
            feeds = {"input": chunk[np.newaxis], "state": state, "sr": rate}
            if index % 8 == 7:
                yield feeds
            _, state = session.run(None, feeds)
            context = chunk[-64:]


def notes(model: Path, fonts: Sequence[Path], seed: int) -> Iterator[Feeds]:
    """Two seconds of decaying chords at 22,050 Hz."""
    del model, fonts
    random, length, rate = np.random.default_rng(seed), 43844, 22050
    time = np.arange(length) / rate
    while True:
        signal = 1e-3 * random.standard_normal(length)
        for _ in range(random.integers(3, 8)):
            pitch = 440 * 2 ** ((random.integers(40, 80) - 69) / 12)
            since = np.clip(time - random.uniform(0, 1.6), 0, None)
            decay = np.exp(-3 * since) * (since > 0)
            for k in range(1, 6):
                signal += 0.15 / k * decay * np.sin(2 * np.pi * k * pitch * since)
        yield {"serving_default_input_2:0": signal.astype(np.float32).reshape(1, length, 1)}


def file_bytes(model: Path, fonts: Sequence[Path], seed: int) -> Iterator[Feeds]:
    """First and last 1024 bytes of files of this Python installation, every suffix as likely."""
    del model, fonts
    by_suffix: dict[str, list[Path]] = {}
    for path in sorted(_library_files()):
        by_suffix.setdefault(path.suffix, []).append(path)
    random = Random(seed)
    while True:
        path = random.choice(by_suffix[random.choice(list(by_suffix))])
        yield {"bytes": _ends(path.read_bytes())[np.newaxis]}


def _library_files() -> Iterator[Path]:
    for folder, below, names in os.walk(sysconfig.get_path("stdlib")):
        if "site-packages" in below:
            below.remove("site-packages")
        yield from (Path(folder, name) for name in names)


def _ends(content: bytes) -> NDArray[np.int32]:
    begin, end = content[:4096].lstrip()[:1024], content[-4096:].rstrip()[-1024:]
    features = np.full(2048, 256, np.int32)  # 256 stands for "no byte here"
    features[: len(begin)] = np.frombuffer(begin, np.uint8)
    features[2048 - len(end) :] = np.frombuffer(end, np.uint8)
    return features


SAMPLES: dict[str, Samples] = {
    "orientation": pages,
    "ocr-rec": lines,
    "ocr-det": page_maps,
    "ocr-cls": turned_lines,
    "silero-vad": voice_chunks,
    "basic-pitch": notes,
    "magika": file_bytes,
}


def take(name: str, model: Path, fonts: Sequence[Path], *, count: int, seed: int) -> list[Feeds]:
    """The first ``count`` feeds for the model of this name."""
    return list(islice(SAMPLES[name](model, fonts, seed), count))
