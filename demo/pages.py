"""Draws pages of text for the page-orientation model: several fonts, layouts and sizes, seeded.

Every page is drawn upright and then turned by 0, 90, 180 or 270 degrees; how far it was turned is
its label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw, ImageFont

ANGLES = (0, 90, 180, 270)
"""What the model's outputs stand for, in order (its metadata list the same names)."""

WIDTH, HEIGHT = 620, 800
_MARGIN = 40
_TEXT = """
the a of and to in is was it for on are as with his they at be this have from or one had by word
but not what all were we when your can said there use an each which she do how their if will up
other about out many then them these so some her would make like him into time has look two more
write go see number no way could people my than first water been call who oil its now find long
down day did get come made may part paper printer letter office river mountain window garden market
people history measure quantity balance invoice account delivery address reference Monday Tuesday
January October company service contract meeting question answer chapter section figure table
"""
_WORDS = _TEXT.split()

Layout = Callable[[ImageDraw.ImageDraw, Random, Path], None]


def write_pages(folder: Path, count: int, seed: int, fonts: Sequence[Path]) -> None:
    """Writes ``count`` pages as PNG files, one sub-folder per label: ``0``, ``1``, ``2``, ``3``.

    Args:
        folder: Made here; must not exist.
        count: Number of pages; the labels take turns.
        seed: The same seed draws the same pages.
        fonts: Font files to choose from.
    """
    for label in range(len(ANGLES)):
        (folder / str(label)).mkdir(parents=True)
    for index, (page, label) in enumerate(draw_pages(count, seed, fonts)):
        page.save(folder / str(label) / f"page-{index:03d}.png", compress_level=1)


def draw_pages(count: int, seed: int, fonts: Sequence[Path]) -> Iterator[tuple[Image.Image, int]]:
    """Yields pages, each turned, with the index of its angle."""
    random = Random(seed)
    layouts: tuple[Layout, ...] = (_letter, _columns, _list, _table, _article)
    for index in range(count):
        label = index % len(ANGLES)
        paper = random.randint(225, 255)
        page = Image.new("L", (WIDTH, HEIGHT), paper)
        random.choice(layouts)(ImageDraw.Draw(page), random, random.choice(fonts))
        yield page.rotate(-ANGLES[label], expand=True, fillcolor=paper).convert("RGB"), label


def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


def draw_words(random: Random, count: int) -> str:
    """Some words of running text."""
    return " ".join(random.choices(_WORDS, k=count))


def _sentence(random: Random, words: int) -> str:
    return draw_words(random, words).capitalize() + "."


def _ink(random: Random) -> int:
    return random.randint(0, 70)


def _wrapped(text: str, font: ImageFont.FreeTypeFont, width: float) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line]


def _fill(
    draw: ImageDraw.ImageDraw,
    random: Random,
    font: ImageFont.FreeTypeFont,
    box: tuple[float, float, float, float],
) -> None:
    """Fills a box (left, top, right, bottom) with paragraphs."""
    left, y, right, bottom = box
    step, ink = font.size * random.uniform(1.2, 1.6), _ink(random)
    while y < bottom:
        for line in _wrapped(_sentence(random, random.randint(15, 60)), font, right - left):
            if y > bottom:
                return
            draw.text((left, y), line, fill=ink, font=font)
            y += step
        y += step * 0.6


def _letter(draw: ImageDraw.ImageDraw, random: Random, face: Path) -> None:
    font = _font(face, random.randint(20, 28))
    for line in range(3):
        draw.text((_MARGIN, 40 + 32 * line), _sentence(random, 3), fill=_ink(random), font=font)
    _fill(draw, random, font, (_MARGIN, 180, WIDTH - _MARGIN, HEIGHT - 120))
    draw.text((_MARGIN, HEIGHT - 80), _sentence(random, 2), fill=_ink(random), font=font)


def _columns(draw: ImageDraw.ImageDraw, random: Random, face: Path) -> None:
    font, gap = _font(face, random.randint(18, 24)), 24
    width = (WIDTH - 2 * _MARGIN - gap) / 2
    for left in (_MARGIN, _MARGIN + width + gap):
        _fill(draw, random, font, (left, 50, left + width, HEIGHT - 60))


def _list(draw: ImageDraw.ImageDraw, random: Random, face: Path) -> None:
    font, ink = _font(face, random.randint(22, 30)), _ink(random)
    draw.text((_MARGIN, 40), _sentence(random, 3), fill=ink, font=_font(face, 38))
    y, number = 110.0, 1
    while y < HEIGHT - 60:
        lines = _wrapped(_sentence(random, random.randint(5, 16)), font, WIDTH - 2 * _MARGIN - 50)
        draw.text((_MARGIN, y), f"{number}.", fill=ink, font=font)
        for line in lines:
            draw.text((_MARGIN + 50, y), line, fill=ink, font=font)
            y += font.size * 1.35
        number += 1


def _table(draw: ImageDraw.ImageDraw, random: Random, face: Path) -> None:
    font, ink = _font(face, random.randint(20, 26)), _ink(random)
    draw.text((_MARGIN, 36), _sentence(random, 4), fill=ink, font=_font(face, 34))
    row = int(font.size * 1.8)
    for y in range(110, HEIGHT - 80, row):
        draw.line((_MARGIN, y - 6, WIDTH - _MARGIN, y - 6), fill=ink)
        draw.text((_MARGIN + 6, y), draw_words(random, 3), fill=ink, font=font)
        amount = f"{random.uniform(1, 9999):,.2f}"
        draw.text((WIDTH - _MARGIN - 6, y), amount, fill=ink, font=font, anchor="ra")


def _article(draw: ImageDraw.ImageDraw, random: Random, face: Path) -> None:
    font = _font(face, random.randint(20, 26))
    title = _wrapped(_sentence(random, 6), _font(face, 44), WIDTH - 2 * _MARGIN)
    for line, text in enumerate(title):
        draw.text((_MARGIN, 36 + 50 * line), text, fill=_ink(random), font=_font(face, 44))
    top = 60 + 50 * len(title)
    picture = (WIDTH // 2, top, WIDTH - _MARGIN, top + random.randint(120, 200))
    draw.rectangle(picture, fill=random.randint(120, 200))
    _fill(draw, random, font, (_MARGIN, top, WIDTH // 2 - 20, picture[3]))
    _fill(draw, random, font, (_MARGIN, picture[3] + 20, WIDTH - _MARGIN, HEIGHT - 60))
