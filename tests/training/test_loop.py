"""The loop: what is kept, when it ends, and that a killed run goes on as if nothing had been."""

# ruff: noqa: E402 # the check for torch comes before what needs it
from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")
from torch import nn
from torch.nn import functional

from slimctl.core.contract import SilentProgress
from slimctl.core.errors import OptionError, PassFailedError, SampleError
from slimctl.graph.edit import clone_model
from slimctl.graph.save import content_hash
from slimctl.training.checkpoint import Checkpoint
from slimctl.training.loop import Trained, Training, find_device
from slimctl.training.losses import loss_named
from slimctl.training.module import TrainableGraph
from slimctl.training.objective import FromLabels
from slimctl.training.samples import Samples
from slimctl.training.settings import Settings
from tests.training.training_data import COUNT, classifier, cut, separable

BATCH = 7
STEPS = -(-COUNT // BATCH)
EPOCHS = 3
ALWAYS = 1e-9
"""Minutes between two checkpoints: one after each step."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIMCTL_CACHE", str(tmp_path))
    return tmp_path


class Run:
    """One run on a small classifier; ``model`` holds what it learned when it is over."""

    def __init__(
        self,
        *,
        judge: Callable[[Run], float | None] = lambda run: None,
        after_step: Callable[[Run], None] = lambda run: None,
        fixed: int | None = None,
        seed: int = 0,
        minutes: float = 0.0,
        labels: bool = True,
        sizes: Sequence[int] = (COUNT,),
        **settings: Any,
    ) -> None:
        self.model = classifier()
        self.module = TrainableGraph(self.model)
        x, classes = separable()
        options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "learning_rate": 0.02}
        self.steps = 0
        self.checkpoint = Checkpoint("run", minutes)

        def count() -> None:
            self.steps += 1
            after_step(self)

        data = cut({"x": x}, classes if labels else None, sizes)
        self.training = Training(
            self.module,
            Samples(data, BATCH, fixed=fixed, progress=SilentProgress()),
            FromLabels("y", loss_named("cross-entropy"), "cross-entropy"),
            Settings(**{**options, **settings}),
            seed=seed,
            threads=1,
            judge=lambda: judge(self),
            progress=SilentProgress(),
            checkpoint=self.checkpoint,
            after_step=count,
        )

    def go(self) -> Trained:
        done = self.training.run()
        self.module.write_back(self.model)
        return done

    @property
    def learned(self) -> str:
        return content_hash(self.model)


def test_a_run_learns() -> None:
    done = Run(epochs=20).go()
    assert done.losses[-1] < 0.5 * done.losses[0]
    assert (len(done.losses), done.epoch, done.kept) == (20, 20, 20)
    assert not done.metrics
    assert done.best == -math.inf


def test_a_step_is_one_of_plain_torch() -> None:
    """By hand, with the order of the samples as it was drawn: clipped, warmed up, AdamW."""
    run, seen = Run(epochs=1, warmup=0.5, clip_norm=0.1, weight_decay=0.1), Run()
    batches = [part for (part,) in seen.training._samples.epoch(0, 0)]
    weights = dict(zip(seen.module.learned, seen.module.weights, strict=True))
    decaying = [weights[name] for name in "wu"]
    optimizer = torch.optim.AdamW(
        [
            {"params": decaying, "weight_decay": 0.1},
            {"params": [weights[name] for name in "bstc"], "weight_decay": 0.0},
        ],
        0.02,
    )
    seen.module.train()
    losses = []
    for step, part in enumerate(batches):
        optimizer.zero_grad()
        loss = functional.cross_entropy(seen.module(part.feeds, ["y"])["y"], part.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(list(weights.values()), 0.1)
        warm = round(0.5 * STEPS)
        share = (step + 1) / (warm + 1)
        if step >= warm:
            share = (1 + math.cos(math.pi * (step - warm) / (STEPS - warm))) / 2
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * share
        optimizer.step()
        losses.append(loss.item())
    assert run.go().losses == [pytest.approx(np.mean(losses), rel=1e-6)]
    seen.module.write_back(seen.model)
    for name, value in run.model.graph.initializers.items():
        other = seen.model.graph.initializers[name].const_value
        assert value.const_value is not None
        assert other is not None
        np.testing.assert_allclose(value.const_value.numpy(), other.numpy(), rtol=1e-5, atol=1e-7)


def test_parts_add_up_to_the_gradient_of_a_batch() -> None:
    """A model that takes one sample at a time learns as one that takes all at once."""
    whole, single = Run(epochs=1, fixed=None), Run(epochs=1, fixed=1)
    for run in (whole, single):  # statistics of a batch of one would not be the same
        run.module.train = lambda mode=True: None  # type: ignore[method-assign]
    losses = [run.go().losses[0] for run in (whole, single)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_equal_runs_give_equal_bytes() -> None:
    runs = [Run(augment="", seed=3), Run(augment="", seed=3), Run(augment="", seed=4)]
    for run in runs:
        run.go()
    assert runs[0].learned == runs[1].learned != runs[2].learned


def test_random_numbers_of_the_process_are_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    Run(epochs=1).go()
    assert torch.equal(torch.rand(1), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # as torch has it at first


# the best of all epochs


def judged(*metrics: float | None) -> Callable[[Run], float | None]:
    """One metric after another, the first for the model as it was."""
    waiting: Iterator[float | None] = iter(metrics)
    return lambda run: next(waiting)


@pytest.mark.parametrize(
    ("metrics", "kept"),
    [
        ((0.1, 0.5, 0.9, 0.7), 2),
        ((0.9, 0.5, 0.6, 0.7), 0),
        ((0.1, 0.5, 0.5, 0.5), 1),
        ((math.nan, math.nan, 0.2, 0.1), 2),
        ((-3.0, -2.0, -1.0, -0.5), 3),
    ],
)
def test_the_best_weights_are_kept(metrics: Sequence[float], kept: int) -> None:
    states: list[dict[str, torch.Tensor]] = []
    given = judged(*metrics)

    def judge(run: Run) -> float | None:
        assert not run.module.training
        states.append({name: t.clone() for name, t in run.module.state_dict().items()})
        return given(run)

    run = Run(judge=judge)
    done = run.go()
    assert done.kept == kept
    assert len(done.metrics) == 1 + EPOCHS
    assert not run.module.training
    for name, tensor in run.module.state_dict().items():
        assert torch.equal(tensor, states[kept][name])
    before = content_hash(classifier())
    assert (run.learned == before) == (kept == 0)


def test_without_a_metric_the_last_weights_are_kept() -> None:
    run = Run(judge=judged(*[None] * 4))
    assert run.go().kept == EPOCHS
    assert run.learned != content_hash(classifier())


@pytest.mark.parametrize(
    ("metrics", "patience", "epochs"),
    [
        ((0.5, 0.6, 0.6, 0.6, 0.6, 0.6), 2, 3),
        ((0.5, 0.4, 0.4), 2, 2),
        ((0.5, 0.4, 0.6, 0.5, 0.5), 2, 4),
        ((0.5, 0.4, 0.4, 0.4, 0.4, 0.4), 0, 5),
        ((0.5, 0.6, 0.7, 0.8, 0.9, 1.0), 1, 5),
    ],
)
def test_training_ends_early(metrics: Sequence[float], patience: int, epochs: int) -> None:
    run = Run(judge=judged(*metrics), epochs=5, patience=patience)
    done = run.go()
    assert len(done.losses) == epochs
    assert run.steps == epochs * STEPS
    assert done.ended_early == (epochs < 5)


def test_patience_without_a_metric_does_nothing() -> None:
    assert len(Run(patience=1).go().losses) == EPOCHS


# what goes wrong


def test_a_loss_that_is_no_number_says_where() -> None:
    def spoil(run: Run) -> None:
        if run.steps == STEPS + 2:
            with torch.no_grad():
                run.module.weights[0].fill_(math.nan)

    with pytest.raises(PassFailedError, match="The loss is nan in epoch 2, step 3") as caught:
        Run(after_step=spoil).go()
    assert "--learning-rate" in caught.value.fix


def test_so_does_a_gradient() -> None:
    run = Run()
    run.module.weights[0].register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(
        PassFailedError, match=r"norm of the gradient is (nan|inf) in epoch 1, step"
    ):
        run.go()


def test_labels_that_are_missing_name_the_sample() -> None:
    with pytest.raises(SampleError, match="no labels"):
        Run(labels=False).go()


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta"])
def test_devices_that_are_not_there(device: str) -> None:
    with pytest.raises(OptionError) as caught:
        find_device(device)
    assert "cpu" in caught.value.fix


# going on after a kill


class KilledError(Exception):
    """Whatever ends a process."""


def killed(at: int) -> Callable[[Run], None]:
    def kill(run: Run) -> None:
        if run.steps == at:
            raise KilledError

    return kill


def measured(run: Run) -> float:
    """A metric that goes up and down, and depends on the weights."""
    return math.sin(1000 * sum(weight.sum().item() for weight in run.module.weights))


@pytest.mark.parametrize("at", [1, 2, STEPS, STEPS + 1, STEPS * EPOCHS])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_run_that_was_killed_ends_as_one_that_was_not(at: int, optimizer: str) -> None:
    """Killed in a step, after it changed the weights: what is on disk is from the step before."""
    options: dict[str, Any] = {"judge": measured, "optimizer": optimizer, "schedule": "one-cycle"}
    undisturbed = Run(**options)
    expected = undisturbed.go()

    stopped = Run(**options, after_step=killed(at), minutes=ALWAYS)
    with pytest.raises(KilledError):
        stopped.go()
    assert stopped.checkpoint.exists == (at > 1)
    resumed = Run(**options, minutes=ALWAYS, resume=True)
    found = resumed.go()
    assert found.resumed_at == at - 1
    assert resumed.steps == STEPS * EPOCHS - (at - 1)
    assert resumed.learned == undisturbed.learned
    assert (found.losses, found.metrics, found.kept) == (
        expected.losses,
        expected.metrics,
        expected.kept,
    )
    assert not resumed.checkpoint.exists
    assert not list(resumed.checkpoint.path.parent.iterdir())


def test_so_does_one_that_was_killed_twice_with_augmentations_and_windows() -> None:
    options: dict[str, Any] = {"judge": measured, "sizes": (11, 11, 8), "epochs": 4}
    undisturbed = Run(**options)
    undisturbed.go()
    for at, resume in ((5, False), (9, True)):
        with pytest.raises(KilledError):
            Run(**options, after_step=killed(at), minutes=ALWAYS, resume=resume).go()
    last = Run(**options, minutes=ALWAYS, resume=True)
    assert last.go().resumed_at == 4 + 8
    assert last.learned == undisturbed.learned


def test_a_checkpoint_is_not_used_unasked() -> None:
    with pytest.raises(KilledError):
        Run(after_step=killed(4), minutes=ALWAYS).go()
    run = Run(minutes=ALWAYS)
    assert run.checkpoint.exists
    assert run.go().resumed_at == 0
    assert run.steps == STEPS * EPOCHS
    assert not run.checkpoint.exists


def test_ctrl_c_waits_for_the_step_and_leaves_a_checkpoint() -> None:
    undisturbed = Run(judge=measured)
    undisturbed.go()
    before = signal.getsignal(signal.SIGINT)

    def interrupt(run: Run) -> None:
        if run.steps == 6:
            signal.raise_signal(signal.SIGINT)

    stopped = Run(judge=measured, after_step=interrupt, minutes=60.0)
    with pytest.raises(KeyboardInterrupt):
        stopped.go()
    assert signal.getsignal(signal.SIGINT) is before
    resumed = Run(judge=measured, minutes=60.0, resume=True)
    assert resumed.go().resumed_at == 6
    assert resumed.learned == undisturbed.learned


def test_ctrl_c_in_the_last_measurement_ends_the_command_too() -> None:
    def judge(run: Run) -> float:
        if run.steps == STEPS * EPOCHS:
            signal.raise_signal(signal.SIGINT)
        return measured(run)

    with pytest.raises(KeyboardInterrupt):
        Run(judge=judge, minutes=60.0).go()
    resumed = Run(judge=measured, minutes=60.0, resume=True)
    assert resumed.go().resumed_at == STEPS * EPOCHS
    assert resumed.steps == 0


def test_the_second_ctrl_c_does_not_wait() -> None:
    def interrupt(run: Run) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    run = Run(after_step=interrupt, minutes=60.0)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    assert run.steps == 1
    assert not run.checkpoint.exists


_KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from tests.training.test_loop import ALWAYS, Run, measured

def kill(run):
    if run.steps == 8:
        os.kill(os.getpid(), signal.SIGKILL)

Run(judge=measured, after_step=kill, minutes=ALWAYS).go()
"""


def test_a_process_that_was_killed_can_be_continued() -> None:
    root = str(Path(__file__).resolve().parents[2])
    script = _KILLED.format(root=root)
    done = subprocess.run([sys.executable, "-c", script], cwd=root, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    resumed, undisturbed = Run(judge=measured, minutes=ALWAYS, resume=True), Run(judge=measured)
    assert resumed.go().resumed_at == 7
    undisturbed.go()
    assert resumed.learned == undisturbed.learned


# checkpoints

STATE = {"done": {"epoch": 1}, "weights": torch.ones(3)}


def test_a_checkpoint_is_read_as_it_was_written() -> None:
    checkpoint = Checkpoint("a", 1.0)
    assert checkpoint.read() is None
    checkpoint.write(STATE)
    found = Checkpoint("a", 1.0).read()
    assert found is not None
    assert found["done"] == STATE["done"]
    assert torch.equal(found["weights"], torch.ones(3))
    assert not Checkpoint("b", 1.0).exists
    assert [path.name for path in checkpoint.path.parent.iterdir()] == ["a.pt"]
    checkpoint.remove()
    checkpoint.remove()
    assert not checkpoint.exists


def test_without_minutes_there_are_none() -> None:
    checkpoint = Checkpoint("a", 0.0)
    assert not checkpoint.due()
    checkpoint.write(STATE)
    assert not checkpoint.exists


def test_it_is_due_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("slimctl.training.checkpoint.time.monotonic", lambda: now)
    checkpoint = Checkpoint("a", 2.0)
    now = 119.0
    assert not checkpoint.due()
    now = 120.0
    assert checkpoint.due()
    checkpoint.write(STATE)
    assert not checkpoint.due()


def _damages() -> Iterable[tuple[str, Callable[[bytes], bytes]]]:
    yield "empty", lambda content: b""
    yield "cut off", lambda content: content[: len(content) // 2]
    yield "a few bytes", lambda content: content[:10]
    yield "text", lambda content: b"hello\n" * 50
    yield "zeros", lambda content: bytes(len(content))
    yield "one bit", lambda content: content[:-600] + bytes([content[-600] ^ 1]) + content[-599:]
    yield "a pickle", lambda content: b"\x80\x04cos\nsystem\n(S'true'\ntR."


_DAMAGES: Mapping[str, Callable[[bytes], bytes]] = dict(_damages())


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_checkpoint_is_ignored(damage: str) -> None:
    with pytest.raises(KilledError):
        Run(after_step=killed(4), minutes=ALWAYS).go()
    path = Run(minutes=ALWAYS).checkpoint.path
    path.write_bytes(_DAMAGES[damage](path.read_bytes()))
    run, undisturbed = Run(minutes=ALWAYS, resume=True), Run()
    assert run.go().resumed_at == 0
    undisturbed.go()
    assert run.learned == undisturbed.learned
    assert not run.checkpoint.exists


def test_a_failed_write_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint("a", 1.0)
    checkpoint.write(STATE)

    def fail(*arguments: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        checkpoint.write({})
    found = checkpoint.read()
    assert found is not None
    assert found["done"] == STATE["done"]
    assert [path.name for path in checkpoint.path.parent.iterdir()] == ["a.pt"]


def test_a_clone_takes_what_was_learned() -> None:
    """As the judge sees it, while the model is still as it was."""
    run, hashes = Run(), []

    def judge(run: Run) -> float | None:
        trial: ir.Model = clone_model(run.model)
        run.module.write_back(trial)
        hashes.append(content_hash(trial))
        assert content_hash(run.model) == content_hash(classifier())
        return None

    run = Run(judge=judge)
    run.go()
    assert len(set(hashes)) == 1 + EPOCHS
    assert hashes[0] == content_hash(classifier())
    assert hashes[-1] == run.learned
