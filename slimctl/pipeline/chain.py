"""From the steps that somebody wrote to the chain of single passes that runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slimctl.core.contract import Effect, Pass
from slimctl.core.errors import ConfigError
from slimctl.core.target import Target


class Link(NamedTuple):
    """One pass of a chain.

    Attributes:
        origin: Index of the written step that it came from.
        step: The pass with every default explicit.
    """

    origin: int
    step: Pass


def resolve_chain(steps: Sequence[Pass], target: Target) -> list[Link]:
    """Every step resolved for the target and expanded into single passes.

    An EXACT pass right behind an equal one is left out: an exact pass has nothing left to do the
    second time.
    """
    chain: list[Link] = []
    for origin, written in enumerate(steps):
        for step in _singles(written, target):
            if not (chain and chain[-1].step == step and step.effect is Effect.EXACT):
                chain.append(Link(origin, step))
    return chain


def _singles(step: Pass, target: Target) -> Iterator[Pass]:
    resolved = step.resolve(target)
    parts = resolved.expand()
    if parts == (resolved,):
        yield resolved
        return
    for part in parts:
        yield from _singles(part, target)


class OrderProblem(NamedTuple):
    """One step that cannot stand where it stands.

    Attributes:
        position: Of the step in the chain, from 0.
        what: What is wrong.
        fix: What to do.
    """

    position: int
    what: str
    fix: str


def order_problem(steps: Sequence[Pass]) -> OrderProblem | None:
    """The first impossible step of a chain, or None.

    A pass declares with ``after`` what must stand before it, and with ``not_after`` what must not.
    """
    earlier: list[str] = []
    for index, step in enumerate(steps):
        forbidden = [name for name in earlier if name in step.not_after]
        if forbidden:
            return _forbidden(index, step, forbidden[-1])
        if step.after and not step.after.intersection(earlier):
            return _missing(index, step, steps[index + 1 :])
        earlier.append(step.name)
    return None


def _forbidden(index: int, step: Pass, earlier: str) -> OrderProblem:
    if earlier == step.name:
        what = f"Step '{step.name}' cannot run twice in a chain"
        fix = "remove one of the two"
    else:
        what = f"Step '{step.name}' cannot run after '{earlier}'"
        fix = f"move '{step.name}' before '{earlier}'"
    return OrderProblem(index, what, fix)


def _missing(index: int, step: Pass, later: Sequence[Pass]) -> OrderProblem:
    wanted = " or ".join(f"'{name}'" for name in sorted(step.after))
    found_later = next((other.name for other in later if other.name in step.after), None)
    fix = (
        f"move it behind '{found_later}'"
        if found_later
        else f"add a step {wanted} before it, or remove it"
    )
    return OrderProblem(index, f"Step '{step.name}' needs {wanted} before it", fix)


def check_order(steps: Sequence[Pass]) -> None:
    """Refuses an impossible chain.

    Raises:
        ConfigError: Names the step and the remedy.
    """
    problem = order_problem(steps)
    if problem is not None:
        raise ConfigError(problem.what, where=f"step {problem.position + 1}", fix=problem.fix)
