from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

from slimctl.cli.group import COMMANDS, root_command
from slimctl.core.registry import BUILT_IN, find_pass

HEAVY = {
    "onnxruntime",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "torch",
    "datasets",
    "pandas",
    "pydantic",
    "numpy",
    "PIL",
    "yaml",
    "rich",
}


def _modules_after(*arguments: str) -> set[str]:
    program = (
        "import json, sys\n"
        "from slimctl.cli.main import run\n"
        f"code = run({list(arguments)!r})\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stderr))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["recipe", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert HEAVY & _modules_after(*arguments) == set()


def test_help_lists_every_command_with_its_summary(slimctl) -> None:
    ended = slimctl("--help")
    assert ended.code == 0
    assert ended.stderr == ""
    listed = {" ".join(line.split()) for line in ended.stdout.splitlines()}
    for name, entry in COMMANDS.items():
        assert f"{name} {entry.summary}" in listed
    for name, entry in BUILT_IN.items():
        assert (f"{name} {entry.summary}." in listed) == entry.command


def test_no_arguments_print_the_help(slimctl) -> None:
    assert slimctl() == slimctl("--help")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_repeats_what_the_command_says(name: str) -> None:
    command = root_command().load(name)
    assert inspect.cleandoc(command.help).splitlines()[0] == COMMANDS[name].summary


@pytest.mark.parametrize("name", [name for name, entry in BUILT_IN.items() if entry.command])
def test_the_registry_repeats_what_the_pass_says(name: str) -> None:
    assert find_pass(name).summary == BUILT_IN[name].summary


def _leaves(command, path: tuple[str, ...]):
    for name, listed in getattr(command, "commands", {}).items():
        child = listed.load() if hasattr(listed, "load") else listed
        yield (*path, name), child
        yield from _leaves(child, (*path, name))


ALL = dict(_leaves(root_command(), ()))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_of_every_command(path: tuple[str, ...], slimctl) -> None:
    ended = slimctl(*path, "--help")
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"Usage: slimctl {' '.join(path)}")


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_option_has_a_help_text(path: tuple[str, ...]) -> None:
    for parameter in ALL[path].params:
        assert parameter.help, f"{' '.join(path)}: {parameter.name} has no help"
        assert parameter.help.endswith("."), parameter.name


SAME_EVERYWHERE = {
    "output": ["-o", "--output"],
    "json": ["--json"],
    "quiet": ["-q", "--quiet"],
    "verbose": ["-v", "--verbose"],
    "calib": ["--calib"],
    "data": ["--data"],
    "samples": ["--samples"],
    "batch_size": ["--batch-size"],
    "target": ["--target"],
    "seed": ["--seed"],
    "threads": ["--threads"],
}


def test_options_are_spelled_the_same_everywhere() -> None:
    for path, command in ALL.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name in SAME_EVERYWHERE:
                assert parameter.opts == SAME_EVERYWHERE[parameter.name], path


def test_version_comes_from_the_package(slimctl) -> None:
    from slimctl import __version__

    assert slimctl("--version") == (0, f"slimctl {__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("slimctl qua", {"quantize"}),
        ("slimctl recipe s", {"show", "schema"}),
        ("slimctl quantize m.onnx --calibration m", {"minmax", "mse"}),
        ("slimctl target show cpu-a", {"cpu-arm64", "cpu-avx2"}),
    ],
)
def test_shell_completion(words: str, expected: set[str], monkeypatch, capsys) -> None:
    from slimctl.cli.main import run

    monkeypatch.setenv("_SLIMCTL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ending:
        run([])
    assert ending.value.code == 0
    assert set(capsys.readouterr().out.split()) == expected
