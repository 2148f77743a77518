"""Commands and recipes that the documents show are ones that slimctl knows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from slimctl.cli.group import root_command
from slimctl.recipe.parse import load_recipe
from slimctl.recipe.resolve import check_complete, resolve_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[Any]:
    """Fenced blocks of a language, each with the page it stands on as its name."""
    found = []
    for page in PAGES:
        pattern = rf"^```{language}\n(.*?)^```$"
        texts = re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)
        found += [pytest.param(text, id=f"{page.stem}-{i}") for i, text in enumerate(texts)]
    return found


def commands() -> list[Any]:
    lines = [line for block in blocks("sh") for line in block.values[0].splitlines()]
    wanted = [line.split(";")[0] for line in lines if line.startswith("slimctl ")]
    return sorted(set(wanted))


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line names, and the words behind its name."""
    root = root_command()
    command, rest = root.load(words[0]), words[1:]
    children = getattr(command, "commands", {})
    return (children[rest[0]], rest[1:]) if children else (command, rest)


@pytest.mark.parametrize("line", commands())
def test_command_exists_with_its_options(line: str) -> None:
    command, words = find_command(shlex.split(line)[1:])
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    assert {word for word in words if word.startswith("-")} - known - {"--help"} == set()


@pytest.mark.parametrize("text", blocks("yaml"))
def test_recipe_is_valid_and_complete(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    parsed = load_recipe(tmp_path / "recipe.yaml")
    resolve_recipe(parsed)
    check_complete(parsed)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs" / "adr").glob("*.md"))], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
