"""What pipelines run: the shell of ``action.yml`` and of the documented GitLab job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import yaml

from tests.cli.models import write_inputs

ROOT = Path(__file__).resolve().parents[2]

RECIPE = """\
version: 1
name: tiny
model: model.onnx
target: cpu
data:
  calibration: {source: calib.npz}
steps: [fuse]
gates:
  size: {max_ratio: 2}
output: {store: artifacts}
"""
BROKEN = "gates.size.max_ratio=0.001"


def action() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "action.yml").read_text())


def blocks() -> list[dict[str, Any]]:
    """The YAML of docs/ci.md: a workflow for GitHub, a job for GitLab."""
    page = (ROOT / "docs" / "ci.md").read_text()
    return [yaml.safe_load(text) for text in re.findall(r"^```yml\n(.*?)^```$", page, re.M | re.S)]


def gitlab_job() -> dict[str, Any]:
    (job,) = (block["slimctl"] for block in blocks() if "slimctl" in block)
    return job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with a model, data and a recipe, and the commands of this interpreter."""
    work = tmp_path / "checkout"
    work.mkdir()
    write_inputs(work)
    (work / "recipe.yaml").write_text(RECIPE)
    commands = tmp_path / "bin"
    commands.mkdir()
    script(commands / "slimctl", f'exec "{sys.executable}" -m slimctl "$@"')
    # Nothing is installed; what would be is written down.
    script(commands / "python", f'printf "%s\\n" "$@" >> "{tmp_path}/installed"')
    return work


def script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GITHUB_", "CI_"))}
    return {
        **kept,
        "PATH": f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLIMCTL_CACHE": str(folder.parent / "cache"),
        **more,
    }


class Ended(NamedTuple):
    code: int
    summary: str
    outputs: str
    log: str


def github(folder: Path, **given: str) -> Ended:
    """Runs each step's shell as GitHub does; after a failure those alone that say always()."""
    inputs = {name: str(spec.get("default", "")) for name, spec in action()["inputs"].items()}
    inputs |= given
    variables = environment(
        folder,
        GITHUB_ACTIONS="true",
        GITHUB_ACTION_PATH=str(ROOT),
        GITHUB_OUTPUT=str(folder.parent / "outputs"),
        GITHUB_STEP_SUMMARY=str(folder.parent / "step-summary"),
    )
    code, log = 0, ""
    for step in action()["runs"]["steps"]:
        if "uses" in step or (code and "always()" not in step.get("if", "")):
            continue
        assert step["shell"] == "bash"
        named = {name: filled(value, inputs) for name, value in step.get("env", {}).items()}
        # What GitHub calls "bash": https://docs.github.com/actions/reference/workflow-syntax
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables | named,
            capture_output=True,
            text=True,
            check=False,
        )
        code, log = code or done.returncode, log + done.stdout + done.stderr
    return Ended(code, read(folder.parent / "step-summary"), read(folder.parent / "outputs"), log)


def filled(text: str, inputs: Mapping[str, str]) -> str:
    return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], text)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def gitlab(folder: Path, **given: str) -> Ended:
    """Runs the job as GitLab does: before_script and script in one shell that stops at an error."""
    job = gitlab_job()
    variables = environment(folder, CI="true", GITLAB_CI="true", **(job["variables"] | given))
    lines = ["set -eo pipefail", *job["before_script"], *job["script"]]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(done.returncode, read(folder / "summary.md"), "", done.stdout + done.stderr)


def failures(folder: Path) -> int:
    return int(ElementTree.parse(folder / "junit.xml").getroot().get("failures", "-1"))


def test_the_action_publishes_a_report(folder: Path) -> None:
    ended = github(folder, recipe="recipe.yaml")
    assert ended.code == 0, ended.log
    assert "<html" in (folder / "slimctl-result" / "report.html").read_text()
    assert ended.outputs == "output=slimctl-result\n"
    assert "tiny" in ended.summary
    assert failures(folder) == 0
    assert json.loads((folder / "result.json").read_text())["passed"] is True


def test_a_broken_gate_fails_the_action_and_leaves_the_report(folder: Path) -> None:
    ended = github(folder, recipe="recipe.yaml", set=BROKEN)
    assert ended.code == 1, ended.log
    assert (folder / "slimctl-result" / "report.html").is_file()
    assert (folder / "slimctl-result" / "model.onnx").is_file()
    assert "size" in ended.summary
    assert failures(folder) == 1
    assert "::error" in ended.log


def test_a_wrong_recipe_fails_the_action_without_a_summary(folder: Path) -> None:
    (folder / "summary.md").write_text("of an earlier run")
    ended = github(folder, recipe="recipe.yaml", set="steps.0=fusse")
    assert ended.code == 2, ended.log
    assert ended.summary == ""


def test_changes_are_taken_line_by_line_and_never_run(folder: Path) -> None:
    changes = 'name=renamed\n\nmodel=$(touch owned)"; touch owned; "\nmodel=model.onnx'
    ended = github(folder, recipe="recipe.yaml", set=changes)
    assert ended.code == 0, ended.log
    assert json.loads((folder / "result.json").read_text())["manifest"]["name"] == "renamed"
    assert not (folder / "owned").exists()


def test_a_second_run_replaces_the_first(folder: Path) -> None:
    assert github(folder, recipe="recipe.yaml", set=BROKEN).code == 1
    assert github(folder, recipe="recipe.yaml").code == 0
    assert failures(folder) == 0


@pytest.mark.parametrize(
    ("extras", "installed"), [("", str(ROOT)), ("data,store", f"{ROOT}[data,store]")]
)
def test_the_action_installs_itself_with_extras(folder: Path, extras: str, installed: str) -> None:
    github(folder, recipe="none.yaml", extras=extras)
    words = (folder.parent / "installed").read_text().splitlines()
    assert words == ["-m", "pip", "install", installed]


def test_no_input_is_written_into_a_script() -> None:
    assert [step["run"] for step in action()["runs"]["steps"] if "${{" in step.get("run", "")] == []


def test_what_is_uploaded_is_what_the_run_writes(folder: Path) -> None:
    assert github(folder, recipe="recipe.yaml").code == 0
    (upload,) = (
        step for step in action()["runs"]["steps"] if "upload-artifact" in step.get("uses", "")
    )
    assert "always()" in upload["if"]
    for line in filled(upload["with"]["path"], {"output": "slimctl-result"}).splitlines():
        assert (folder / line).is_file(), line


def test_the_documented_workflow_gives_inputs_that_exist() -> None:
    (workflow,) = (block for block in blocks() if "jobs" in block)
    steps = workflow["jobs"]["compress"]["steps"]
    (given,) = (step["with"] for step in steps if "slimctl@" in step.get("uses", ""))
    known = action()["inputs"]
    assert set(given) <= set(known)
    assert {name for name, spec in known.items() if spec.get("required")} <= set(given)


def test_the_page_lists_every_input() -> None:
    page = (ROOT / "docs" / "ci.md").read_text()
    listed = dict(re.findall(r"^\| `([\w-]+)` \| (.*?) \|", page, re.M))
    wanted = {
        name: "required" if spec.get("required") else f"`{spec['default']}`".replace("``", "none")
        for name, spec in action()["inputs"].items()
    }
    assert listed == wanted


def test_the_gitlab_job_publishes_a_report(folder: Path) -> None:
    ended = gitlab(folder)
    assert ended.code == 0, ended.log
    for path in gitlab_job()["artifacts"]["paths"]:
        assert (folder / path).is_file(), path
    assert failures(folder) == 0


def test_a_broken_gate_fails_the_gitlab_job_and_leaves_the_report(folder: Path) -> None:
    text = RECIPE.replace("max_ratio: 2", "max_ratio: 0.001")
    (folder / "recipe.yaml").write_text(text)
    ended = gitlab(folder)
    assert ended.code == 1, ended.log
    assert gitlab_job()["artifacts"]["when"] == "always"
    for path in gitlab_job()["artifacts"]["paths"]:
        assert (folder / path).is_file(), path
    assert failures(folder) == 1
