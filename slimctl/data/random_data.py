"""Made-up inputs: enough to run a model, never enough to calibrate it honestly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.core.errors import SourceError, nearest
from slimctl.data.batch import Chunk
from slimctl.data.folders import BatchReader, batch_chunk
from slimctl.data.inputs import InputSpec, check_shape, input_specs, shape_text

if TYPE_CHECKING:
    from slimctl.graph.edit import Interface

DEFAULT_BATCHES = 8
"""Random batches when no number of samples is given: as many as smoke tests need."""

_ITEM = re.compile(r"(?P<name>.+)=(?P<sizes>\d+(x\d+)*)")

Sizes = Mapping[str, tuple[int, ...]]


def parse_sizes(spec: str) -> dict[str, tuple[int, ...]]:
    """Sizes from ``random:name=1x3x48x320,other=1x16``; nothing from ``random``.

    Raises:
        SourceError: The text has another form.
    """
    _, _, text = spec.partition(":")
    sizes = {}
    for item in filter(None, text.split(",")):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise SourceError(
                spec, f"'{item}' is no size", fix="write for example random:input=1x3x224x224"
            )
        sizes[match["name"]] = tuple(int(size) for size in match["sizes"].split("x"))
    return sizes


def resolve_sizes(
    specs: Sequence[InputSpec], given: Sizes, source: str, batch_size: int = 1
) -> dict[str, tuple[int, ...]]:
    """A size for every axis of every input.

    Fixed sizes are kept. An open axis 0 becomes ``batch_size``. Any other open axis must be given,
    unless its symbol was given with another input or names the batch.

    Raises:
        SourceError: A size is missing, or one is given for an unknown input.
        SampleError: A given size contradicts the model.
    """
    by_name = {spec.name: spec for spec in specs}
    for name in given:
        if name not in by_name:
            raise SourceError(
                source, f"The model has no input '{name}'", fix=nearest(name, by_name)
            )
        check_shape(by_name[name], given[name], source)
    symbols = _symbols(specs, given, batch_size)
    return {
        spec.name: given[spec.name] if spec.name in given else _filled(spec, symbols, source)
        for spec in specs
    }


def _symbols(specs: Sequence[InputSpec], given: Sizes, batch_size: int) -> dict[str, int]:
    symbols = {
        spec.shape[0]: batch_size for spec in specs if spec.shape and isinstance(spec.shape[0], str)
    }
    for spec in specs:
        for axis, size in zip(spec.shape or (), given.get(spec.name, ()), strict=False):
            if isinstance(axis, str):
                symbols[axis] = size
    return symbols


def _filled(spec: InputSpec, symbols: Mapping[str, int], source: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for axis, size in enumerate(spec.shape or ()):
        if isinstance(size, int):
            sizes.append(size)
        elif isinstance(size, str) and size in symbols:
            sizes.append(symbols[size])
        elif axis == 0:
            sizes.append(1)
        else:
            raise _open_size(spec, source)
    if spec.shape is None:
        raise _open_size(spec, source)
    return tuple(sizes)


def _open_size(spec: InputSpec, source: str) -> SourceError:
    example = "x".join(str(size) if isinstance(size, int) else "1" for size in spec.shape or (1,))
    return SourceError(
        source,
        f"Input '{spec.name}' has the shape {shape_text(spec.shape)}: random data need every"
        " size except the batch",
        fix=f"give them, for example random:{spec.name}={example}",
    )


def random_array(
    generator: np.random.Generator, dtype: ir.DataType, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Standard normal values for floats; zeros and ones for booleans and integers.

    Zero and one are valid token ids, indices, masks and lengths nearly everywhere.
    """
    if dtype == ir.DataType.STRING:
        return np.full(shape, "a", dtype=object)
    if dtype.is_floating_point():
        return np.asarray(generator.standard_normal(shape, np.float32)).astype(dtype.numpy())
    return np.asarray(generator.integers(0, 2, shape)).astype(dtype.numpy())


def random_feeds(
    interface: Interface, *, seed: int, sizes: Sizes | None = None, index: int = 0
) -> Feeds:
    """One run's random inputs.

    Args:
        interface: What the model asks for.
        seed: Same seed and index, same values.
        sizes: Full shapes of inputs with open axes other than the batch.
        index: Number of the batch.

    Raises:
        SourceError: A size is missing.
    """
    specs = input_specs(interface)
    return _draw(specs, resolve_sizes(specs, sizes or {}, "random"), seed, index)


def _draw(specs: Sequence[InputSpec], sizes: Sizes, seed: int, index: int) -> Feeds:
    generator = np.random.default_rng((seed, index))
    return {spec.name: random_array(generator, spec.dtype, sizes[spec.name]) for spec in specs}


class RandomReader(BatchReader):
    """Seeded random batches."""

    kind = "random"

    def __init__(
        self,
        source: str,
        specs: Sequence[InputSpec],
        *,
        seed: int,
        samples: int | None,
        batch_size: int | None,
    ) -> None:
        super().__init__(specs)
        self._seed = seed
        self._sizes = resolve_sizes(specs, parse_sizes(source), source, batch_size or 1)
        per_batch = self._chunk(0).size
        wanted = samples or DEFAULT_BATCHES * per_batch
        self._batches = -(-wanted // max(per_batch, 1))
        self.sample_count = self._batches * per_batch

    def _chunk(self, index: int) -> Chunk:
        feeds = _draw(self._specs, self._sizes, self._seed, index)
        return batch_chunk(feeds, None, self._specs, f"random[{index}]")

    def chunks(self) -> Iterator[Chunk]:
        """One chunk per drawn batch."""
        for index in range(self._batches):
            yield self._chunk(index)

    def facts(self) -> dict[str, Any]:
        """Seed and shapes."""
        return {"seed": self._seed, "sizes": {k: list(v) for k, v in self._sizes.items()}}
