from __future__ import annotations

from typing import ClassVar, Self

import pytest

from slimctl.core.contract import Effect, Pass
from slimctl.core.errors import ConfigError
from slimctl.core.target import Target
from slimctl.pipeline.chain import check_order, order_problem, resolve_chain
from slimctl.targets import load_target


class Tidy(Pass):
    name: ClassVar[str] = "tidy"
    summary: ClassVar[str] = "Exact"
    effect: ClassVar[Effect] = Effect.EXACT
    depth: int = 1


class Round(Pass):
    name: ClassVar[str] = "round"
    summary: ClassVar[str] = "Approximate"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    not_after: ClassVar[frozenset[str]] = frozenset({"round", "late"})
    bits: int | None = None
    tidy: bool = True

    def resolve(self, target: Target) -> Self:
        bits = 8 if self.bits is None else self.bits
        return self.model_copy(update={"bits": bits + (target.name == "cpu")})

    def expand(self) -> tuple[Pass, ...]:
        alone = self.model_copy(update={"tidy": False})
        return (Tidy(), alone, Repair()) if self.tidy else (self,)


class Repair(Pass):
    name: ClassVar[str] = "repair"
    summary: ClassVar[str] = "Approximate"
    effect: ClassVar[Effect] = Effect.APPROXIMATE
    after: ClassVar[frozenset[str]] = frozenset({"round"})


class Late(Pass):
    name: ClassVar[str] = "late"
    summary: ClassVar[str] = "Approximate"
    effect: ClassVar[Effect] = Effect.APPROXIMATE


def names(*steps: Pass) -> list[tuple[int, str]]:
    return [(link.origin, link.step.name) for link in resolve_chain(steps, load_target("cpu"))]


def test_expansion_remembers_which_written_step_it_came_from() -> None:
    assert names(Round()) == [(0, "tidy"), (0, "round"), (0, "repair")]
    assert names(Late(), Round()) == [(0, "late"), (1, "tidy"), (1, "round"), (1, "repair")]


def test_an_exact_pass_right_behind_its_equal_is_left_out() -> None:
    assert names(Tidy(), Round()) == [(0, "tidy"), (1, "round"), (1, "repair")]
    assert names(Tidy(depth=2), Round())[:2] == [(0, "tidy"), (1, "tidy")]
    assert names(Late(), Late()) == [(0, "late"), (1, "late")]


def test_an_expanded_chain_resolves_to_itself() -> None:
    class Fixed(Round):
        def resolve(self, target: Target) -> Self:
            del target
            return self.model_copy(update={"bits": 8})

    target = load_target("cpu")
    once = [link.step for link in resolve_chain([Fixed()], target)]
    assert [link.step for link in resolve_chain(once, target)] == once


@pytest.mark.parametrize(
    ("steps", "index", "what", "fix"),
    [
        ([Round(tidy=False), Round(tidy=False)], 1, "cannot run twice", "remove one"),
        ([Late(), Round(tidy=False)], 1, "cannot run after 'late'", "move 'round' before 'late'"),
        ([Repair(), Round(tidy=False)], 0, "needs 'round' before it", "move it behind 'round'"),
        ([Tidy(), Repair()], 1, "needs 'round' before it", "add a step 'round'"),
    ],
)
def test_impossible_orders(steps: list[Pass], index: int, what: str, fix: str) -> None:
    problem = order_problem(steps)
    assert problem is not None
    assert problem.position == index
    assert what in problem.what
    assert fix in problem.fix
    with pytest.raises(ConfigError, match=what) as caught:
        check_order(steps)
    assert caught.value.where == f"step {index + 1}"


def test_possible_orders() -> None:
    assert order_problem([Tidy(), Round(tidy=False), Late(), Repair(), Tidy()]) is None
