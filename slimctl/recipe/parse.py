"""Text to recipe; every mistake is reported with its file, its line and the nearest valid name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from slimctl.core.contract import Pass
from slimctl.core.errors import ConfigError, OptionError, RecipeError, nearest
from slimctl.core.registry import find_pass
from slimctl.recipe.lines import Document, Place, read_document
from slimctl.recipe.overrides import Override, apply_overrides, parse_override
from slimctl.recipe.schema import Recipe, StepSpec


class ParsedRecipe(NamedTuple):
    """A valid recipe and where it came from.

    Attributes:
        recipe: What it says, overrides included.
        steps: One pass per written step, neither resolved nor expanded.
        path: Its file; its folder is what relative paths are relative to.
        places: Makes errors that name a place in it.
    """

    recipe: Recipe
    steps: tuple[Pass, ...]
    path: Path
    places: Places


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> ParsedRecipe:
    """Reads and checks a recipe file.

    Args:
        path: A YAML file.
        overrides: Texts such as ``steps.1.sparsity=0.4``.

    Raises:
        RecipeError: The recipe is wrong; names the line and the remedy.
        OptionError: An override is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(path, None, "Not a text file", fix="recipes are YAML in UTF-8") from error
    except OSError as error:
        raise RecipeError(
            path, None, f"Cannot read the recipe: {error.strerror}", fix="check the path"
        ) from error
    return parse_recipe(text, path, overrides)


def parse_recipe(text: str, path: Path, overrides: Sequence[str] = ()) -> ParsedRecipe:
    """As :func:`load_recipe`, from text; ``path`` is what errors name."""
    parsed = [parse_override(override) for override in overrides]
    document = apply_overrides(read_document(text, path), parsed)
    places = Places(path, document, parsed)
    try:
        recipe = Recipe.model_validate(document.values)
    except ValidationError as error:
        raise places.mistake(error, (), Recipe) from error
    steps = tuple(_step(places, index, spec) for index, spec in enumerate(recipe.steps))
    return ParsedRecipe(recipe, steps, path, places)


def _step(places: Places, index: int, spec: StepSpec) -> Pass:
    place: Place = ("steps", index)
    try:
        kind = find_pass(spec.name)
    except OptionError as error:
        raise places.error(place, error.what, error.fix) from error
    try:
        return kind.model_validate(spec.options)
    except ValidationError as error:
        raise places.mistake(error, (*place, spec.name), kind) from error
    except OptionError as error:  # a validator that knows the remedy
        raise places.error((*place, spec.name), error.what, error.fix) from error


class Places(NamedTuple):
    """Turns a mistake at a place into an error that names it.

    Attributes:
        path: The recipe's file.
        document: Its text with lines.
        overrides: What ``--set`` changed in it.
    """

    path: Path
    document: Document
    overrides: Sequence[Override]

    def error(self, place: Place, what: str, fix: str) -> ConfigError:
        """The mistake's error: it names the override that made it, or the line."""
        for override in reversed(self.overrides):
            if self._made_by(override, place) or self._made_by(override, _without_pass_name(place)):
                return OptionError(f"--set {override.text}", what, fix=fix)
        return RecipeError(self.path, self.document.line(place), what, fix=fix)

    def _made_by(self, override: Override, place: Place) -> bool:
        if override.place == place[: len(override.place)]:
            return True
        # A key that is not in the file stands there because of an override further in.
        return place not in self.document.lines and override.place[: len(place)] == place

    def mistake(self, error: ValidationError, base: Place, kind: type[BaseModel]) -> ConfigError:
        """The most telling of pydantic's findings, in our words."""
        finding = min(error.errors(include_url=False), key=_rank)
        within = tuple(finding["loc"])
        place = (*base, *within)
        name = str(within[-1]) if within else ""
        owner = _model_at(kind, within[:-1])
        if finding["type"] == "extra_forbidden":
            return self.error(place, f"Unknown key '{name}'", _remedy(name, owner))
        if finding["type"] == "missing":
            return self.error(place[:-1], f"Key '{name}' is missing", f"add '{name}: ...'")
        return self.error(place, *_bad_value(finding, place, _description(owner, name)))


def _remedy(name: str, owner: type[BaseModel] | None) -> str:
    known = list(owner.model_fields) if owner else []
    hint = nearest(name, known)
    return f"{hint} (valid: {', '.join(known)})" if hint.startswith("did") else hint


def _rank(finding: Any) -> int:
    # A misspelled required key is both unknown and missing; the misspelling is the better news.
    return {"extra_forbidden": 0, "missing": 2}.get(finding["type"], 1)


def _description(owner: type[BaseModel] | None, name: str) -> str:
    field = None if owner is None else owner.model_fields.get(name)
    return (field.description if field else None) or ""


def _bad_value(finding: Any, place: Place, description: str) -> tuple[str, str]:
    message = finding["msg"].removeprefix("Value error, ")
    name = next((key for key in reversed(place) if isinstance(key, str)), "recipe")
    what = f"'{name}' is wrong: {message[:1].lower()}{message[1:]}; found {finding['input']!r}"
    if finding["type"] == "literal_error" and isinstance(finding["input"], str):
        return what, nearest(finding["input"], _words(finding["ctx"]["expected"]))
    return what, f"{name}: {description}" if description else "see 'slimctl recipe schema'"


def _words(expected: str) -> list[str]:
    return [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]


def _without_pass_name(place: Place) -> Place:
    # A document says steps.1.prune.sparsity where an override may say steps.1.sparsity.
    return (*place[:2], *place[3:]) if place[:1] == ("steps",) and len(place) > 2 else place


def _model_at(kind: type[BaseModel], place: Place) -> type[BaseModel] | None:
    """The part of a schema that stands at this place."""
    inner: type[BaseModel] | None = kind
    for key in place:
        field = None if inner is None else inner.model_fields.get(str(key))
        inner = None if field is None else _model_in(field.annotation)
    return inner


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) in (Union, UnionType):
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None
