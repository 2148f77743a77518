"""``slimctl verify``: is a model what it claims to be, and who is wrong where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from slimctl.cli.options import (
    BatchSize,
    Json,
    Preprocess,
    Quiet,
    Samples,
    Seed,
    SkipBadSamples,
    Threads,
    Verbose,
    completes,
    optional,
)
from slimctl.cli.output import Output
from slimctl.core.errors import GateFailedError, OptionError, UnsupportedModelError
from slimctl.core.files import check_output, sha256_of_file

if TYPE_CHECKING:
    import onnx_ir as ir

    from slimctl.data.sources import DataSource
    from slimctl.evaluate.compare import Comparison
    from slimctl.evaluate.drops import MetricDrops

_BOUNDS = "Bounds (broken: exit code 1)"
_DATA = "Data"


class Bound(NamedTuple):
    """A bound on every output.

    Attributes:
        option: Its option.
        measure: Attribute of ``OutputComparison``.
        value: None when it is not set.
        is_minimum: Less is broken; otherwise more is.
    """

    option: str
    measure: str
    value: float | None
    is_minimum: bool = True


def verify(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="ONNX model file, or an artifact's folder.",
            show_default=False,
            readable=False,
        ),
    ],
    *,
    against: Annotated[
        Path | None,
        optional(
            "--against",
            "REFERENCE",
            "The original model: each layer and each output is compared with it.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        optional(
            "--data",
            "SOURCE",
            "Data: an npz file, a folder of npz or npy files, of images (with --preprocess) "
            "or of test_data_set_* folders, module:function, or random. Without data the two "
            "runtimes are compared on random inputs.",
            panel=_DATA,
        ),
    ] = None,
    samples: Samples = None,
    batch_size: BatchSize = None,
    preprocess: Preprocess = None,
    skip_bad_samples: SkipBadSamples = False,
    max_step_difference: Annotated[
        int | None,
        optional(
            "--max-step-difference",
            "STEPS",
            "Largest difference between onnxruntime and the built-in runtime at any node, in "
            "quantization steps.",
            panel=_BOUNDS,
            min=0,
        ),
    ] = None,
    min_sqnr: Annotated[
        float | None,
        optional(
            "--min-sqnr",
            "DB",
            "Least signal-to-quantization-noise ratio of every output.",
            panel=_BOUNDS,
        ),
    ] = None,
    min_cosine: Annotated[
        float | None,
        optional(
            "--min-cosine", "NUMBER", "Least cosine similarity of every output.", panel=_BOUNDS
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        optional(
            "--min-agreement",
            "SHARE",
            "Least share of samples with the same top-1 class, from 0 to 1.",
            panel=_BOUNDS,
        ),
    ] = None,
    max_error: Annotated[
        float | None,
        optional(
            "--max-error", "NUMBER", "Largest absolute difference of every output.", panel=_BOUNDS
        ),
    ] = None,
    metric: Annotated[
        str | None,
        optional(
            "--metric",
            "METRIC",
            "Measure what is lost of top1, top5, agreement or module:function, output by "
            "output and layer by layer. Default with --max-metric-drop: top1 of labeled data, "
            "otherwise agreement.",
            autocompletion=completes(["top1", "top5", "agreement"]),
        ),
    ] = None,
    metric_layers: Annotated[
        int,
        typer.Option(
            "--metric-layers",
            metavar="COUNT",
            help="For how many layers to measure the metric with that layer alone quantized, "
            "beginning with the lowest SQNR: a pass over the data each.",
            min=0,
        ),
    ] = 10,
    max_metric_drop: Annotated[
        float | None,
        optional(
            "--max-metric-drop",
            "NUMBER",
            "How much worse than the reference the metric may be at any output.",
            panel=_BOUNDS,
        ),
    ] = None,
    divergence: Annotated[
        bool,
        typer.Option(
            "--divergence/--no-divergence",
            help="Look inside for the first tensor from which on the models differ.",
        ),
    ] = True,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes/--no-nodes",
            help="Compare node by node: with the built-in runtime and with the reference.",
        ),
    ] = True,
    report: Annotated[
        Path | None,
        optional(
            "--report",
            "FILE",
            "Write an HTML page: SQNR along the graph, the worst tensors with their ranges.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing report.")] = False,
    seed: Seed = 0,
    threads: Threads = 0,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Verify a model against its original, node by node.

    The built-in runtime, which computes integers exactly, runs beside onnxruntime and beside the
    original: that shows who is wrong, and where.
    """
    from slimctl.cli.verify_summary import Summary, blocks, to_document
    from slimctl.evaluate.compare import compare_models
    from slimctl.evaluate.drops import metric_drops, worst_layers
    from slimctl.evaluate.verification import FEW_SAMPLES, verify_model
    from slimctl.graph.load import load_model
    from slimctl.graph.session import Products

    output = Output(json=json, quiet=quiet)
    bounds = (
        Bound("--min-sqnr", "sqnr_db", min_sqnr),
        Bound("--min-cosine", "cosine", min_cosine),
        Bound("--min-agreement", "top1_agreement", min_agreement),
        Bound("--max-error", "max_abs_error", max_error, is_minimum=False),
    )
    _check_options(
        bounds,
        against,
        {"--metric": metric, "--max-metric-drop": max_metric_drop},
        max_step_difference,
        report,
        force=force,
        nodes=nodes,
    )
    path, checked = _checked(model)
    network = load_model(path)
    reference = None if against is None else load_model(against)
    options = {
        "batch_size": batch_size,
        "preprocess": preprocess,
        "seed": seed,
        "skip_bad": skip_bad_samples,
    }
    source = _source(data, reference or network, against, samples=samples, **options)
    count = min(samples or FEW_SAMPLES, FEW_SAMPLES)
    few = _source(data, network, against, samples=count, **options)
    progress = output.progress()
    comparison = None
    if against is not None:
        comparison = compare_models(
            against,
            path,
            source.batches(),
            find_divergence=divergence,
            threads=threads,
            products=Products.NATIVE,
            progress=progress,
        )
    found = None
    if nodes:
        with _left_out_nodes(against):
            found = verify_model(
                network,
                [batch.feeds for batch in few.batches()],
                reference=reference,
                providers=_providers(),
                threads=threads,
                progress=progress,
            )
    drops = None
    if reference is not None and (metric is not None or max_metric_drop is not None):
        drops = metric_drops(
            network,
            reference,
            source,
            metric or ("top1" if source.labeled else "agreement"),
            layers=() if found is None else worst_layers(found.layers, metric_layers),
            threads=threads,
            progress=progress,
        )
    failures = [text for bound in bounds for text in broken(bound, comparison)]
    failures += _broken_steps(max_step_difference, found)
    failures += _broken_drops(max_metric_drop, drops)
    summary = Summary(
        model=model,
        sha256=sha256_of_file(path),
        reference=against,
        data=data,
        random_data=source.uncalibrated,
        integrity=checked,
        comparison=comparison,
        verification=found,
        drops=drops,
        failures=tuple(failures),
    )
    if report is not None:
        from slimctl.report.verification import write_report

        write_report(report, to_document(summary))
        output.note(f"report: {report}")
    output.result(to_document(summary), list(blocks(summary, verbose=verbose)))
    if failures:
        raise GateFailedError(
            "The model is not within its bounds: " + "; ".join(failures),
            where=str(model),
            fix="look at the first node that differs, or loosen the bound on purpose",
        )


@contextmanager
def _left_out_nodes(against: Path | None) -> Iterator[None]:
    """Says how to go on where the built-in runtime does not know an operator.

    Raises:
        UnsupportedModelError: The one that was raised inside, with another remedy.
    """
    try:
        yield
    except UnsupportedModelError as error:
        reference = " and --against REFERENCE" if against is None else ""
        raise UnsupportedModelError(
            error.what,
            where=error.where,
            fix=f"add --no-nodes{reference}: onnxruntime alone compares the outputs",
        ) from error


def _check_options(
    bounds: Sequence[Bound],
    against: Path | None,
    metrics: Mapping[str, object],
    max_step_difference: int | None,
    report: Path | None,
    *,
    force: bool,
    nodes: bool,
) -> None:
    """What cannot be done is said before anything runs."""
    wanted = [bound.option for bound in bounds if bound.value is not None]
    wanted += [option for option, given in metrics.items() if given is not None]
    if against is None and wanted:
        raise OptionError(
            wanted[0],
            f"{wanted[0]} compares with an original, and there is none",
            fix="add --against REFERENCE, or leave the option out",
        )
    for option, given in (("--report", report), ("--max-step-difference", max_step_difference)):
        if given is not None and not nodes:
            raise OptionError(option, f"{option} is about nodes", fix="leave --no-nodes out")
    if report is not None and report.exists() and not force:
        raise OptionError("--report", f"'{report}' exists", fix="add --force to replace it")
    if report is not None:
        check_output(report, force=True)


def _checked(model: Path) -> tuple[Path, str]:
    """The model's file, and what its manifest says about it.

    Raises:
        OutputError: A file of the artifact is missing or was changed.
    """
    from slimctl.pipeline.artifact import manifest_path, read_artifact

    manifest = manifest_path(model)
    if not model.is_dir() and not manifest.exists():
        return model, "no manifest beside the model: its hash was not checked"
    artifact = read_artifact(model)
    files = len(artifact.manifest.files)
    said = f"{files} file{'s' * (files > 1)} as the manifest describes"
    return artifact.model, f"{said}; {_provider_of(artifact.manifest.target)}"


def _provider_of(target: str) -> str:
    """Whether the provider that an artifact was made for can be asked here."""
    from slimctl.targets import load_target, target_names

    if target not in target_names():  # a profile of the user's own, which is not in the artifact
        return f"made for {target}"
    provider = load_target(target).provider
    installed = provider in _providers()
    return f"made for {target}, whose {provider} is {'' if installed else 'not '}installed here"


def _source(data: str | None, model: ir.Model, against: Path | None, **options: Any) -> DataSource:
    from slimctl.data.sources import open_source
    from slimctl.graph.edit import interface

    if data is None and against is not None:
        raise OptionError(
            "--data",
            "Comparing with a reference needs data",
            fix="add --data SOURCE, or --data random to see that the models run",
        )
    return open_source(data or "random", interface=interface(model), **options)


def _providers() -> list[str]:
    """Installed execution providers that run models on this machine."""
    from slimctl.graph.session import installed_providers

    return [name for name in installed_providers() if name not in _REMOTE]


_REMOTE = ("AzureExecutionProvider",)
"""Runs models elsewhere."""


def broken(bound: Bound, comparison: Comparison | None) -> Iterator[str]:
    """Every output for which a bound does not hold, in words.

    An output that a measure does not apply to is passed over, but a bound that applies to no output
    at all is broken: it would protect nothing.
    """
    if bound.value is None or comparison is None:
        return
    found = [(out.name, getattr(out, bound.measure)) for out in comparison.outputs]
    if all(value is None for _, value in found):
        yield f"{bound.option} {bound.value:g} applies to no output"
    for name, value in found:
        if value is None:
            continue
        holds = value >= bound.value if bound.is_minimum else value <= bound.value
        if not holds:  # NaN breaks every bound
            yield f"output '{name}' has {value:.4g}, {bound.option} is {bound.value:g}"


def _broken_steps(bound: int | None, found: object) -> Iterator[str]:
    from slimctl.evaluate.verification import Verification

    if bound is None:
        return
    farthest = found.farthest if isinstance(found, Verification) else None
    if farthest is None:
        yield f"--max-step-difference {bound} applies to no node"
    elif farthest.steps > bound:
        yield (
            f"the runtimes differ by {farthest.steps} steps at node '{farthest.node}',"
            f" --max-step-difference is {bound}"
        )


def _broken_drops(bound: float | None, drops: MetricDrops | None) -> Iterator[str]:
    if bound is None or drops is None:
        return
    for drop in drops.outputs:
        if not drop.drop <= bound:  # NaN breaks every bound
            place = f" at output '{drop.output}'" if drop.output else ""
            yield (
                f"{drops.metric} went from {drop.reference:.4f} to {drop.model:.4f}{place},"
                f" --max-metric-drop is {bound:g}"
            )
