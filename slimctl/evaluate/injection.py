"""What errors of single layers do to a model's outputs, without a session for each layer.

The error that a layer makes, when it is changed and reads what it would read in the model, is
computed for all layers in one run. Then the model itself is run with the error of one layer added
to that layer's output, for one layer after the other: in a session that has an input for every
error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from slimctl.core.contract import Feeds
from slimctl.evaluate.parts import output_parts
from slimctl.evaluate.probing import Errors, Loss
from slimctl.evaluate.scores import score_views
from slimctl.graph.edit import NameScope, const_array
from slimctl.graph.restart import restarted
from slimctl.graph.session import open_session, run, tapped
from slimctl.runtime.kernels.quantize import dequantize_linear, quantize_linear


class Injector:
    """One model, some samples, and errors of its layers.

    Args:
        model: With inferred types; must not be changed afterwards.
        samples: Its inputs, one sample or batch each.
        threads: Threads of onnxruntime, 0 for all cores.
    """

    def __init__(self, model: ir.Model, samples: Sequence[Feeds], *, threads: int = 0) -> None:
        self._model = model
        self._samples = samples
        self._threads = threads

    def losses(
        self, variant: ir.Model, groups: Mapping[str, Collection[str]], *, scores: bool = False
    ) -> dict[str, Loss | None]:
        """The error of the outputs for each group of layers, changed as they are in a variant.

        Args:
            variant: The model with all layers changed; they are known by their names.
            groups: Names of layers by group.
            scores: Probabilities are seen by what they were made from, to which errors add up.

        Returns:
            By group; None where a layer's output is not found in the variant.

        Raises:
            ModelExecutionError: onnxruntime refuses a model.
        """
        layers = {layer for names in groups.values() for layer in names}
        places = _places(self._model, variant, layers)
        changed = _Changed(self._model, variant, places.values(), self._threads)
        session, inputs = self._open(places.values(), changed.taps)
        outputs = [value.name or "" for value in self._model.graph.outputs]
        parts, views = output_parts(self._model), score_views(self._model) if scores else {}
        found = {
            group: Errors(parts, views)
            for group, names in groups.items()
            if set(names) <= set(places)
        }
        for feeds in self._samples:
            silent = dict(inputs.values())
            real = run(session, {**feeds, **silent})
            reference = {name: real[name] for name in outputs}
            errors = changed.errors({**feeds, **real})
            for group, measured in found.items():
                made = [places[layer].tensor for layer in groups[group]]
                loud = {inputs[name][0]: errors[name] for name in made}
                measured.add(reference, run(session, {**feeds, **silent, **loud}, outputs))
        losses = {group: measured.loss() for group, measured in found.items()}
        return {group: losses.get(group) for group in groups}

    def _open(
        self, places: Collection[_Place], taps: Collection[str]
    ) -> tuple[Any, dict[str, tuple[str, NDArray[Any]]]]:
        """The model with an input behind each place that is added there.

        Args:
            places: Where.
            taps: Tensors that are given besides the outputs.

        Returns:
            Its session, and by tensor the name of the input and a value that changes nothing.
        """
        clone = tapped(self._model, sorted(taps))
        values = ir.convenience.create_value_mapping(clone.graph, include_subgraphs=False)
        names = NameScope(clone)
        inputs = {}
        for place in places:
            value = values[place.tensor]
            kind = value.dtype or ir.DataType.FLOAT
            inputs[place.tensor] = _add(clone, value, names), np.zeros((), kind.numpy())
        return open_session(clone, threads=self._threads), inputs


def _add(model: ir.Model, value: ir.Value, names: NameScope) -> str:
    """Lets all readers of a tensor read the sum of it and of a new input."""
    node = value.producer()
    assert node is not None, "the output of a layer"
    error = ir.Value(
        name=names.fresh(f"{value.name}_error"),
        type=ir.TensorType(value.dtype or ir.DataType.FLOAT),
    )
    uses = list(value.uses())
    added = ir.Node("", "Add", [value, error], name=names.fresh_node(f"{node.name}_with_error"))
    added.outputs[0].name = names.fresh(f"{value.name}_with_error")
    for use in uses:
        use.node.replace_input_with(use.idx, added.outputs[0])
    model.graph.insert_after(node, added)
    model.graph.inputs.append(error)
    for index, output in enumerate(model.graph.outputs):
        if output is value:  # an output keeps its name
            value.name, added.outputs[0].name = added.outputs[0].name, value.name
            added.outputs[0].type, added.outputs[0].shape = value.type, value.shape
            model.graph.outputs[index] = added.outputs[0]
    return error.name or ""


def _made(model: ir.Model) -> set[str]:
    """Names of what nodes of the main graph compute."""
    return {value.name or "" for node in model.graph for value in node.outputs}


class _Place(NamedTuple):
    """Where a layer writes to.

    Attributes:
        tensor: Name of its output in the model.
        changed: Name of that in the variant.
    """

    tensor: str
    changed: str


def _places(model: ir.Model, variant: ir.Model, layers: Collection[str]) -> dict[str, _Place]:
    """Those of some layers of a model that are in a variant, by name."""
    nodes = {node.name: node for node in variant.graph if node.outputs}
    made = _made(variant)
    found = {}
    for node in model.graph:
        if node.name not in layers or node.outputs[0].dtype is None:
            continue
        name, own = node.name or "", node.outputs[0].name or ""
        other = nodes.get(node.name)
        if other is not None and other.op_type == node.op_type:
            found[name] = _Place(own, other.outputs[0].name or "")
        elif own in made:  # by a node of another operator
            found[name] = _Place(own, own)
    return found


class _Changed:
    """All layers of a variant, each of which reads what the model makes.

    Args:
        model: The model.
        variant: It with its layers changed.
        places: Outputs of layers.
        threads: Threads of onnxruntime.
    """

    def __init__(
        self, model: ir.Model, variant: ir.Model, places: Collection[_Place], threads: int
    ) -> None:
        own = {
            value.name: value.dtype
            for node in model.graph
            for value in node.outputs
            if const_array(value) is None and value.dtype is not None
        }
        # Where a name is in both models, the variant reads what the model makes.
        values = ir.convenience.create_value_mapping(variant.graph, include_subgraphs=False)
        shared = {
            n: own[n]
            for n in sorted(_made(variant))
            if n in own and values[n].dtype in (None, own[n])  # float16 goes on from itself
        }
        begun = restarted(variant, shared, [place.changed for place in places])
        self._given = dict(begun.inputs)
        self._asked = {value.name for value in variant.graph.inputs}
        self._inputs = [v.name or "" for v in begun.model.graph.inputs if v.name in self._asked]
        self._rounding = {p.tensor: _rounding(values[p.changed]) for p in places}
        self._places = places
        self._layers = open_session(begun.model, threads=threads)

    @property
    def taps(self) -> set[str]:
        """Tensors of the model that are needed to tell errors."""
        return {*self._given, *(place.tensor for place in self._places)}

    def errors(self, real: Feeds) -> Feeds:
        """What each place holds more than in the model, from the model's tensors and inputs."""
        given = {new: real[name] for name, new in self._given.items()}
        given |= {name: real[name] for name in self._inputs if name in real}
        found = run(self._layers, given)
        return {
            place.tensor: self._error(place.tensor, found[place.changed], real[place.tensor])
            for place in self._places
        }

    def _error(self, name: str, found: NDArray[Any], real: NDArray[Any]) -> NDArray[Any]:
        rounding = self._rounding[name]
        if rounding is not None:
            codes = quantize_linear(found, *rounding)
            found = dequantize_linear(codes, *rounding)
        error: NDArray[Any] = found.astype(real.dtype) - real
        return error


def _rounding(value: ir.Value) -> tuple[NDArray[Any], NDArray[Any] | None] | None:
    """Scale and zero point of the QuantizeLinear that reads a tensor; None without one."""
    for use in value.uses():
        if use.node.op_type == "QuantizeLinear" and use.idx == 0:
            scale, zero_point = (const_array(v) for v in (*use.node.inputs[1:3], None)[:2])
            return None if scale is None else (scale, zero_point)
    return None
