"""Options that several commands share, spelled the same everywhere.

Paths are ``readable=False``: typer's own check would speak first, and the code that opens the file
says better what is wrong and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

_DATA = "Data"
_KINDS = (
    "an npz file, a folder of npz or npy files, of images (with --preprocess) or of "
    "test_data_set_* folders, IDX files, a table (csv, jsonl, parquet), hf:NAME#SPLIT, "
    "module:function"
)
"""Kinds of data; docs/data.md says more."""
_COMMON = "Common"


def completes(values: Sequence[str]) -> Callable[[str], list[str]]:
    """Shell completion from a fixed list of words."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def optional(name: str, metavar: str, text: str, *, panel: str | None = None, **more: Any) -> Any:
    """An option with a value and without a default that help would show.

    Args:
        name: With its dashes.
        metavar: What stands for the value.
        text: Help.
        panel: Where help lists it.
        more: As ``typer.Option`` takes it, bounds for example.
    """
    return typer.Option(
        name,
        metavar=metavar,
        help=text,
        rich_help_panel=panel,
        show_default=False,
        readable=False,
        **more,
    )


def output_option(
    metavar: str, text: str, *, panel: str | None = None, shown: str | bool = False
) -> Any:
    """The option ``-o`` of a command.

    Args:
        metavar: What stands for the path.
        text: Help.
        panel: Where help lists it.
        shown: What help shows as its default.
    """
    return typer.Option(
        "-o",
        "--output",
        metavar=metavar,
        help=text,
        rich_help_panel=panel,
        show_default=shown,
        readable=False,
    )


def complete_target(incomplete: str) -> list[str]:
    """Target names for shell completion."""
    from slimctl.targets import target_names

    return [name for name in target_names() if name.startswith(incomplete)]


def complete_metric(incomplete: str) -> list[str]:
    """Metric names for shell completion."""
    from slimctl.evaluate.metrics import metric_names

    return [name for name in metric_names() if name.startswith(incomplete)]


Model: TypeAlias = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="ONNX model file.", show_default=False, readable=False),
]
OutputPath: TypeAlias = Annotated[
    Path,
    output_option(
        "PATH",
        "Output: a file x.onnx (x.manifest.json is written beside it), or a folder for the "
        "full artifact.",
        panel=_COMMON,
    ),
]
Force: TypeAlias = Annotated[
    bool,
    typer.Option("--force", help="Replace an existing output.", rich_help_panel=_COMMON),
]
Calibration: TypeAlias = Annotated[
    str | None,
    optional("--calib", "SOURCE", f"Calibration data: {_KINDS}, or random.", panel=_DATA),
]
Data: TypeAlias = Annotated[
    str,
    optional("--data", "SOURCE", f"Data: {_KINDS}, or random.", panel=_DATA),
]
EvaluationData: TypeAlias = Annotated[
    str | None,
    optional(
        "--data",
        "SOURCE",
        "Labeled data to measure --metric on, before and after; as --calib.",
        panel=_DATA,
    ),
]
TrainingData: TypeAlias = Annotated[
    str,
    optional("--data", "SOURCE", f"Samples to learn from: {_KINDS}.", panel=_DATA),
]
OptionalTrainingData: TypeAlias = Annotated[
    str | None,
    optional(
        "--train-data",
        "SOURCE",
        "Samples to learn from, all of them, where the options say that something is "
        "trained; the calibration data when it is not given.",
        panel=_DATA,
    ),
]
JudgingData: TypeAlias = Annotated[
    str | None,
    optional(
        "--eval-data",
        "SOURCE",
        "Other labeled samples: after each epoch --metric is measured on them, and the best "
        "weights are kept.",
        panel=_DATA,
    ),
]
Metric: TypeAlias = Annotated[
    str,
    typer.Option(
        "--metric",
        metavar="METRIC",
        help="What is measured on the evaluation data: a name from 'slimctl eval --list', or "
        "module:function.",
        rich_help_panel=_DATA,
        autocompletion=complete_metric,
    ),
]
DryRun: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Do and report everything, and write nothing.",
        rich_help_panel=_COMMON,
        show_default=False,
    ),
]
Samples: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--samples",
        metavar="N",
        min=1,
        help="Use at most N samples.",
        rich_help_panel=_DATA,
        show_default="all",
    ),
]
BatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        min=1,
        help="Samples per run of the model.",
        rich_help_panel=_DATA,
        show_default="what the model and the source suggest",
    ),
]
Preprocess: TypeAlias = Annotated[
    str | None,
    optional(
        "--preprocess",
        "PRESET|FILE",
        "How images become inputs: a preset's name or a YAML file.",
        panel=_DATA,
    ),
]
SkipBadSamples: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--skip-bad-samples",
        help="Leave samples with NaN or Inf out and count them, instead of stopping.",
        rich_help_panel=_DATA,
    ),
]
UseCache: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Use and fill the cache of calibration results.",
        rich_help_panel=_DATA,
    ),
]
TargetName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Execution-provider profile, a name from 'slimctl target list' or a YAML file.",
        autocompletion=complete_target,
        rich_help_panel=_COMMON,
    ),
]
Seed: TypeAlias = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="Seed of everything random.", rich_help_panel=_COMMON),
]
Threads: TypeAlias = Annotated[
    int,
    typer.Option(
        "--threads",
        metavar="N",
        min=0,
        help="Threads of onnxruntime; 0 leaves the number to it.",
        rich_help_panel=_COMMON,
    ),
]
Store: TypeAlias = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="STORE",
        envvar="SLIMCTL_STORE",
        help="The ledger: what recipes call output.store, a folder or a URL such as "
        "s3://bucket/models.",
        rich_help_panel=_COMMON,
    ),
]
DEFAULT_STORE = "artifacts"
"""What the presets write."""

Json: TypeAlias = Annotated[
    bool,
    typer.Option("--json", help="Print the result as one JSON document.", rich_help_panel=_COMMON),
]
Quiet: TypeAlias = Annotated[
    bool,
    typer.Option(
        "-q", "--quiet", help="No progress and no notes on stderr.", rich_help_panel=_COMMON
    ),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "-v",
        "--verbose",
        help="Full lists instead of their beginnings.",
        rich_help_panel=_COMMON,
    ),
]
