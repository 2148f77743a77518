from __future__ import annotations

from pathlib import Path

import pytest

from slimctl.core.errors import ConfigError, OptionError, RecipeError
from slimctl.recipe.parse import load_recipe, parse_recipe
from slimctl.recipe.resolve import check_complete, resolve_recipe

PATH = Path("recipe.yaml")

WHOLE = """\
version: 1
name: orientation-int8
model: models/orientation.onnx
target: cpu
data:
  calibration: {source: data/calib, samples: 128, preprocess: imagenet}
  evaluation: {source: data/val.npz, metric: top1}
steps:
  - tidy
  - shrink: {grid: 0.5}
gates:
  accuracy: {max_drop: 0.01}
  latency: {min_speedup: 1.5, percentile: p50}
  size: {max_ratio: 0.35}
  sqnr: {min_db: 20}
output: {store: artifacts}
"""


def test_a_whole_recipe() -> None:
    parsed = parse_recipe(WHOLE, PATH)
    assert parsed.recipe.data.calibration is not None
    assert parsed.recipe.data.calibration.samples == 128
    assert [step.name for step in parsed.steps] == ["tidy", "shrink"]
    assert parsed.steps[1].model_dump() == {"grid": 0.5, "mode": "near", "tidy": True}
    assert parsed.recipe.gates.latency is not None
    assert parsed.recipe.gates.latency.threads == 1


HEAD = "version: 1\nname: a\n"


@pytest.mark.parametrize(
    ("text", "line", "what", "fix"),
    [
        (HEAD + "steps: [tidy]\nfoo: 1\n", 4, "Unknown key 'foo'", "valid names: data,"),
        (HEAD + "setps: [tidy]\n", 3, "Unknown key 'setps'", "did you mean 'steps'?"),
        (
            HEAD + "steps: [tidy]\ngates:\n  size:\n    max_ratoi: 1\n",
            6,
            "Unknown key 'max_ratoi'",
            "did you mean 'max_ratio'?",
        ),
        (
            HEAD + "steps: [tidy]\ngates:\n  carbon: {max_grams: 0}\n",
            5,
            "Unknown key 'carbon'",
            "valid names: accuracy, latency, memory, placement, size, sqnr, verify",
        ),
        (
            HEAD + "steps: [tidy]\ngates:\n  verify: {}\n",
            5,
            "give at least one of max_step_difference, min_sqnr, max_metric_drop, max_faults",
            "node by node",
        ),
        (
            HEAD + "steps: [tidy]\ngates:\n  verify:\n    max_step_difference: -1\n",
            6,
            "'max_step_difference' is wrong",
            "depends on the processor",
        ),
        (
            HEAD + "steps:\n  - tidy\n  - shrnk\n",
            5,
            "Unknown pass 'shrnk'",
            "did you mean 'shrink'",
        ),
        (
            HEAD + "steps:\n  - tidy\n  - shrink:\n      gird: 1\n",
            6,
            "Unknown key 'gird'",
            "did you mean 'grid'?",
        ),
        (
            HEAD + "steps:\n  - shrink: {grid: -1}\n",
            4,
            "'grid' is wrong: input should be greater than 0; found -1",
            "Distance of the values",
        ),
        (
            HEAD + "steps:\n  - shrink:\n      mode: neer\n",
            5,
            "'mode' is wrong: input should be 'near' or 'down'; found 'neer'",
            "did you mean 'near'?",
        ),
        (HEAD + "steps:\n  - tidy: 7\n", 4, "wrong", ""),
        (HEAD + "steps:\n  - {tidy: {}, shrink: {}}\n", 4, "a step is the name of a pass", ""),
        (HEAD + "steps: []\n", 3, "at least 1 item", "The chain of passes"),
        ("name: a\nsteps: [tidy]\n", 1, "Key 'version' is missing", "add 'version: ...'"),
        ("version: 2\nname: a\nsteps: [tidy]\n", 1, "input should be 1", ""),
        ("version: 1\nname: ../a\nsteps: [tidy]\n", 2, "'name' is wrong", "Name of the result"),
        (HEAD + "name: b\nsteps: [tidy]\n", 3, "Key 'name' stands twice", "remove one"),
        (HEAD + "steps: [tidy\n", 4, "Not valid YAML", "indentation"),
        (HEAD + "\tsteps: [tidy]\n", 3, "Not valid YAML", "indentation"),
        ("- tidy\n", 1, "A recipe is a mapping", "version: 1"),
        ("", 1, "A recipe is a mapping", "version: 1"),
        (HEAD + "steps: [tidy]\noutput: {}\n", 4, "give one of 'store' and 'path'", ""),
        (
            HEAD + "steps: [tidy]\ndata:\n  calibration:\n    source: x\n    samples: many\n",
            7,
            "'samples' is wrong",
            "At most this many",
        ),
    ],
)
def test_a_mistake_names_line_and_remedy(text: str, line: int, what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, PATH)
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where == f"recipe.yaml:{line}"


@pytest.mark.parametrize(
    ("steps", "line", "what", "fix"),
    [
        ("  - shrink\n  - tidy\n  - shrink\n", 6, "'shrink' cannot run twice", "remove one"),
        ("  - repair\n  - shrink: {tidy: false}\n", 4, "needs 'shrink' before", "behind 'shrink'"),
        ("  - tidy\n  - repair\n", 5, "needs 'shrink' before", "add a step 'shrink'"),
    ],
)
def test_impossible_orders_name_the_line(steps: str, line: int, what: str, fix: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_recipe(parse_recipe(f"{HEAD}steps:\n{steps}", PATH))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.line == line


def test_unknown_targets_name_the_line() -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_recipe(parse_recipe(HEAD + "target: cpuu\nsteps: [tidy]\n", PATH))
    assert caught.value.line == 3
    assert "did you mean 'cpu'?" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (HEAD + "steps: [tidy]\n", 1, "names no model"),
        (HEAD + "model: m.onnx\nsteps:\n  - tidy\n  - shrink\n", 6, "needs calibration data"),
        (
            HEAD + "model: m.onnx\nsteps: [tidy]\ngates:\n  sqnr: {min_db: 3}\n",
            6,
            "Gate 'sqnr' needs data",
        ),
        (
            HEAD + "model: m.onnx\nsteps: [tidy]\ndata: {evaluation: {source: v}}\n"
            "gates:\n  size: {max_ratio: 1}\n  accuracy: {max_drop: 0}\n",
            8,
            "Gate 'accuracy' needs labeled data and a metric",
        ),
        (
            HEAD + "model: m.onnx\nsteps: [tidy]\ndata: {calibration: {source: c}}\n"
            "gates:\n  verify: {max_faults: 0}\n",
            7,
            "Gate 'verify' needs evaluation data",
        ),
        (
            HEAD + "model: m.onnx\nsteps: [tidy]\ndata: {evaluation: {source: v}}\n"
            "gates:\n  verify:\n    max_metric_drop: 0\n",
            8,
            "A bound on the metric needs a metric",
        ),
    ],
)
def test_what_running_needs(text: str, line: int, what: str) -> None:
    parsed = parse_recipe(text, PATH)
    resolve_recipe(parsed)
    with pytest.raises(RecipeError) as caught:
        check_complete(parsed)
    assert what in caught.value.what
    assert caught.value.line == line
    assert caught.value.fix


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(tmp_path)
    binary = tmp_path / "model.onnx"
    binary.write_bytes(b"\x08\x07\xff\xfe")
    with pytest.raises(RecipeError, match="Not a text file"):
        load_recipe(binary)


def test_aliases_that_contain_themselves_end() -> None:
    with pytest.raises(ConfigError):
        parse_recipe(HEAD + "steps: &loop [tidy, *loop]\n", PATH)


class TestOverrides:
    def test_change_values_by_place(self) -> None:
        changes = [
            "steps.1.grid=0.25",
            "gates.size.max_ratio=0.5",
            "gates.latency=null",
            "seed=7",
            "data.calibration.samples=3",
        ]
        parsed = parse_recipe(WHOLE, PATH, changes)
        assert parsed.steps[1].model_dump()["grid"] == 0.25
        assert parsed.recipe.gates.size is not None
        assert parsed.recipe.gates.size.max_ratio == 0.5
        assert parsed.recipe.gates.latency is None
        assert parsed.recipe.seed == 7

    def test_may_name_the_pass(self) -> None:
        parsed = parse_recipe(WHOLE, PATH, ["steps.1.shrink.grid=0.25"])
        assert parsed.steps[1].model_dump()["grid"] == 0.25

    @pytest.mark.parametrize("step", ["shrink", "shrink:", "shrink: {}"])
    def test_give_options_to_a_step_without(self, step: str) -> None:
        parsed = parse_recipe(f"{HEAD}steps:\n  - {step}\n", PATH, ["steps.0.grid=0.25"])
        assert parsed.steps[0].model_dump()["grid"] == 0.25

    def test_make_what_is_missing(self) -> None:
        parsed = parse_recipe(HEAD + "steps: [tidy]\n", PATH, ["gates.size.max_ratio=0.5"])
        assert parsed.recipe.gates.size is not None

    def test_replace_a_step(self) -> None:
        parsed = parse_recipe(WHOLE, PATH, ["steps.1=tidy"])
        assert [step.name for step in parsed.steps] == ["tidy", "tidy"]

    @pytest.mark.parametrize(
        ("text", "what", "fix"),
        [
            ("steps.1.gird=1", "Unknown key 'gird'", "did you mean 'grid'?"),
            ("steps.1.shrink.gird=1", "Unknown key 'gird'", "did you mean 'grid'?"),
            ("steps.1.grid=0", "greater than 0", "Distance"),
            ("steps.2.grid=1", "points at nothing", "counted from 0"),
            ("steps.grid=1", "points at nothing", "counted from 0"),
            ("name.x=1", "points at nothing", ""),
            ("steps.0=tdiy", "Unknown pass 'tdiy'", "did you mean 'tidy'?"),
            ("gates.szie.max_ratio=1", "Unknown key 'szie'", "did you mean 'size'?"),
            ("seed", "Not of the form KEY=VALUE", "seed=1"),
            ("a..b=1", "Not of the form", ""),
            ("seed=[", "not valid YAML", "quotes"),
        ],
    )
    def test_mistakes_name_the_override(self, text: str, what: str, fix: str) -> None:
        with pytest.raises(OptionError) as caught:
            parse_recipe(WHOLE, PATH, [text])
        assert what in caught.value.what
        assert fix in caught.value.fix
        assert caught.value.option == f"--set {text}"

    def test_paths_are_relative_to_where_they_are_typed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "c.npz").touch()
        monkeypatch.chdir(tmp_path / "here")
        changes = ["model=m.onnx", "data.calibration.source=c.npz", "output.store=store"]
        job = resolve_recipe(parse_recipe(WHOLE, tmp_path / "recipes" / "r.yaml", changes))
        assert job.model == tmp_path / "here" / "m.onnx"
        assert job.calibration is not None
        assert job.calibration.source == str(tmp_path / "here" / "c.npz")
        assert job.output == tmp_path / "here" / "store" / "orientation-int8"
        assert job.evaluation is not None
        assert job.evaluation.source == str(tmp_path / "recipes" / "data" / "val.npz")
