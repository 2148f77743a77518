"""A real browser without a window: draws pages and says how wide they became."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

_NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
_LIGHT, _DARK = 1, 0  # blink::mojom::PreferredColorScheme
_SECONDS = 60

# Elements inside of something that scrolls by itself, or is folded, may be as wide as they want.
_PROBE = """<script>addEventListener("load", () => {
  const root = document.documentElement;
  const free = (node) => node.parentElement.closest(".scroll, .chart, details:not([open])");
  const wide = [...document.body.querySelectorAll("*")].filter((node) =>
    node.getBoundingClientRect().right > root.clientWidth + 1 && !free(node));
  const names = wide.map((node) => `${node.tagName}.${node.className}`).join(", ");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.measured = [root.scrollWidth, root.scrollHeight, dark, names].join(";");
});</script></body>"""


class Seen(NamedTuple):
    """A page as the browser shows it; sizes in CSS pixels.

    Attributes:
        width: Of everything; more than the window's when one has to scroll sideways.
        height: Of everything.
        dark: Whether the page was asked to be dark.
        wide: Elements that reach out of the window.
        said: What the console said.
        picture: A PNG of the window.
    """

    width: int
    height: int
    dark: bool
    wide: str
    said: list[str]
    picture: Path


def find_browser() -> str | None:
    """A browser that can run without a window; ``SLIMCTL_BROWSER`` names another."""
    given = os.environ.get("SLIMCTL_BROWSER")
    found = (shutil.which(name) for name in ([given] if given else _NAMES))
    return next(filter(None, found), None)


def look(browser: str, page: str, size: tuple[int, int], folder: Path, *, dark: bool) -> Seen:
    """Opens a copy of a page that holds a script which measures it.

    Args:
        browser: Its program.
        page: The page's text.
        size: Of the window.
        folder: An empty one, for the copy, the picture and what the browser keeps.
        dark: Whether the user prefers dark pages.
    """
    copy, picture = folder / "page.html", folder / "page.png"
    assert page.count("</body>") == 1
    copy.write_text(page.replace("</body>", _PROBE), encoding="utf-8")
    command = [
        *(browser, "--headless", "--disable-gpu", "--no-sandbox", "--disable-dev-shm-usage"),
        *("--no-first-run", f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars"),
        f"--blink-settings=preferredColorScheme={_DARK if dark else _LIGHT}",
        *(f"--window-size={size[0]},{size[1]}", "--enable-logging=stderr"),
        *("--dump-dom", f"--screenshot={picture}", copy.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    found = re.search(r'data-measured="(\d+);(\d+);(true|false);([^"]*)"', done.stdout)
    assert found, done.stderr
    width, height, is_dark, wide = found.groups()
    # Other lines are the browser's own, about buses and graphics that the machine does not have.
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(int(width), int(height), is_dark == "true", wide, said, picture)
