"""Which tensors of a student correspond to which of its teacher: read off the two graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import onnx_ir as ir

from slimctl.core.errors import OptionError, nearest
from slimctl.graph.edit import Dimension, Port, const_tensor, dimensions, interface
from slimctl.training.losses import find_output, scores_behind

Kind = Literal["classes", "sigmoid", "values"]
"""What an output holds: scores of classes that exclude each other, scores of which each is a yes
or no of its own, or plain numbers."""

_TEACHER, _FEATURE = "--teacher", "--feature"
_MOST_FEATURES = 6
"""Pairs that are found by themselves, at most: a network has about as many resolutions."""
_SPREAD = 4
"""The same where all candidates have one resolution, as in transformers."""


class OutputPair(NamedTuple):
    """An output.

    Attributes:
        name: Of the student's output.
        student: The student's tensor: the output, or the scores behind it.
        teacher: The teacher's.
        kind: What it holds.
        axis: Of the classes.
    """

    name: str
    student: str
    teacher: str
    kind: Kind
    axis: int = 1


class FeaturePair(NamedTuple):
    """Two tensors in the middle.

    Attributes:
        student: The student's.
        teacher: The teacher's.
        axis: Of the channels.
        widths: Channels of the student's and of the teacher's.
    """

    student: str
    teacher: str
    axis: int
    widths: tuple[int, int]


class AttentionPair(NamedTuple):
    """The scores of two attention maps, [N, heads, queries, keys].

    Attributes:
        student: The student's.
        teacher: The teacher's.
        axis: Over which each sums up to one.
    """

    student: str
    teacher: str
    axis: int


class Pairs(NamedTuple):
    """All that is compared.

    Attributes:
        outputs: Outputs.
        features: Tensors in the middle.
        attention: Attention maps.
        different: Names of attention maps that cannot be compared.
    """

    outputs: Sequence[OutputPair]
    features: Sequence[FeaturePair] = ()
    attention: Sequence[AttentionPair] = ()
    different: Sequence[str] = ()

    @property
    def student(self) -> list[str]:
        """Tensors of the student."""
        return [
            *(pair.student for pair in self.outputs),
            *(pair.student for pair in self.features),
            *(pair.student for pair in self.attention),
        ]

    @property
    def teacher(self) -> list[str]:
        """Tensors of the teacher."""
        return [
            *(pair.teacher for pair in self.outputs),
            *(pair.teacher for pair in self.features),
            *(pair.teacher for pair in self.attention),
        ]


# inputs and outputs


def match_inputs(student: ir.Model, teacher: ir.Model) -> dict[str, str]:
    """The teacher's input for each of the student's: by name, or else in order.

    Raises:
        OptionError: They do not correspond.
    """
    return _matched("input", interface(student).inputs, interface(teacher).inputs)


def _matched(word: str, ours: Sequence[Port], theirs: Sequence[Port]) -> dict[str, str]:
    by_name = {port.name: port for port in theirs}
    if {port.name for port in ours} == set(by_name):
        pairs = [(port, by_name[port.name]) for port in ours]
    elif len(ours) == len(theirs):
        pairs = list(zip(ours, theirs, strict=True))
    else:
        raise OptionError(
            _TEACHER,
            f"The teacher has {_listed(word, theirs)}, the student {_listed(word, ours)}",
            fix=f"give a teacher with the same {word}s",
        )
    for port, other in pairs:
        if not _compatible(port.shape, other.shape):
            raise OptionError(
                _TEACHER,
                f"The student's {word} '{port.name}' has the shape {_text(port.shape)}, the "
                f"teacher's '{other.name}' {_text(other.shape)}",
                fix=f"give a teacher with the same {word}s",
            )
    return {port.name: other.name for port, other in pairs}


def _listed(word: str, ports: Sequence[Port]) -> str:
    names = ", ".join(f"'{port.name}'" for port in ports)
    return f"{len(ports)} {word}{'' if len(ports) == 1 else 's'} ({names})"


def _text(shape: Sequence[Dimension] | None) -> str:
    return "unknown" if shape is None else str([dim if dim is not None else "?" for dim in shape])


def _compatible(ours: Sequence[Dimension] | None, theirs: Sequence[Dimension] | None) -> bool:
    """Whether a tensor can have both shapes; how many samples it holds does not count."""
    if ours is None or theirs is None:
        return True
    fixed = zip(ours[1:], theirs[1:], strict=False)
    return len(ours) == len(theirs) and all(
        a == b for a, b in fixed if isinstance(a, int) and isinstance(b, int)
    )


def match_outputs(
    student: ir.Model,
    teacher: ir.Model,
    *,
    kind: Kind | None,
    labels: tuple[str, str] | None,
) -> list[OutputPair]:
    """All outputs of floats, with what they hold.

    A Softmax, LogSoftmax or Sigmoid at the end of either model tells. Without one, labels tell what
    the output that they are for holds, by the loss; all others are values.

    Args:
        student: The student.
        teacher: The teacher.
        kind: Of all outputs; None to find out.
        labels: Name of the output that labels are for (the first of floats when empty), and name
            of their loss; None without labels.

    Raises:
        OptionError: The outputs do not correspond.
        UnsupportedModelError: No output holds floats.
    """
    partners = _matched("output", interface(student).outputs, interface(teacher).outputs)
    theirs = {value.name or "": value for value in teacher.graph.outputs}
    find_output(student, "")  # there is one
    labeled, loss = ("", "")
    if labels is not None:
        labeled, loss = find_output(student, labels[0]).name or "", labels[1]
    found = []
    for value in student.graph.outputs:
        if value.dtype is None or not value.dtype.is_floating_point():
            continue
        name = value.name or ""
        other = theirs[partners[name]]
        known = kind or _kind_by_graph(value) or _kind_by_graph(other)
        known = known or (_BY_LOSS.get(loss, "values") if name == labeled else "values")
        axis = _class_axis(value, other, -1 if loss == "ctc" else 1)
        found.append(OutputPair(name, _scores(value, known), _scores(other, known), known, axis))
    return found


_BY_LOSS: Mapping[str, Kind] = {"cross-entropy": "classes", "ctc": "classes", "bce": "sigmoid"}
_BY_OPERATOR: Mapping[str, Kind] = {
    "Softmax": "classes",
    "LogSoftmax": "classes",
    "Sigmoid": "sigmoid",
}


def _kind_by_graph(value: ir.Value) -> Kind | None:
    node = value.producer()
    return None if node is None or node.domain else _BY_OPERATOR.get(node.op_type)


def _scores(value: ir.Value, kind: Kind) -> str:
    """Name of the tensor that is compared."""
    node = value.producer()
    if node is None or kind == "values" or _BY_OPERATOR.get(node.op_type) != kind:
        return value.name or ""
    return scores_behind(value, node.op_type)


def _class_axis(value: ir.Value, other: ir.Value, otherwise: int) -> int:
    for candidate in (value, other):
        node = candidate.producer()
        if node is not None and node.op_type in ("Softmax", "LogSoftmax"):
            return _softmax_axis(node)
    return otherwise


def _softmax_axis(node: ir.Node) -> int:
    attribute = node.attributes.get("axis")
    return -1 if attribute is None else attribute.as_int()


# features


def named_features(student: ir.Model, teacher: ir.Model, pairs: Sequence[str]) -> list[FeaturePair]:
    """Features that somebody named, as ``STUDENT=TEACHER``. Shapes of both models are inferred.

    Raises:
        OptionError: There is no such tensor, or the two cannot be compared.
    """
    ours, theirs = _computed(student), _computed(teacher)
    found = []
    for text in pairs:
        first, _, second = text.partition("=")
        value, other = _tensor(first, ours, "student"), _tensor(second or first, theirs, "teacher")
        axis = _channel_axis(value)
        shape, shape_there = dimensions(value.shape), dimensions(other.shape)
        axis = 1 if axis is None else axis
        widths = None if shape is None else _widths(shape, shape_there, axis)
        if widths is None:
            raise OptionError(
                _FEATURE,
                f"'{text}' pairs {_text(shape)} with {_text(shape_there)}",
                fix="name tensors of which only the number of channels differs",
            )
        found.append(FeaturePair(first, second or first, axis, widths))
    return found


def _tensor(name: str, known: Mapping[str, ir.Value], whose: str) -> ir.Value:
    if name not in known:
        raise OptionError(
            _FEATURE, f"The {whose} has no tensor '{name}'", fix=nearest(name, list(known))
        )
    return known[name]


def find_features(student: ir.Model, teacher: ir.Model) -> list[FeaturePair]:
    """Tensors of one name in both graphs at the ends of blocks. Shapes of both are inferred.

    Of convolutional networks the last tensor of each resolution; where all have one, as in
    transformers, some of the sums, evenly spread.
    """
    theirs = _computed(teacher)
    found: dict[tuple[Dimension, ...], list[tuple[ir.Value, FeaturePair]]] = {}
    for name, value in _computed(student).items():
        node, other = value.producer(), theirs.get(name)
        if node is None or other is None or value.is_graph_output() or not _ends_block(node):
            continue
        shape, axis = dimensions(value.shape), _channel_axis(value)
        if shape is None or axis is None or len(shape) < 3:
            continue
        widths = _widths(shape, dimensions(other.shape), axis)
        if widths is not None:
            places = tuple(dim for index, dim in enumerate(shape) if index not in (0, axis))
            found.setdefault(places, []).append((value, FeaturePair(name, name, axis, widths)))
    if len(found) == 1:
        return _spread(next(iter(found.values())))
    return [group[-1][1] for group in found.values()][-_MOST_FEATURES:]


def _spread(group: Sequence[tuple[ir.Value, FeaturePair]]) -> list[FeaturePair]:
    sums = [pair for value, pair in group if _operator(value) == "Add"]
    pairs = sums if len(sums) > 1 else [pair for _, pair in group]
    count = min(_SPREAD, len(pairs))
    return [pairs[(index + 1) * len(pairs) // count - 1] for index in range(count)]


def _operator(value: ir.Value) -> str:
    node = value.producer()
    return "" if node is None else node.op_type


def _computed(model: ir.Model) -> dict[str, ir.Value]:
    """Floats that nodes compute from the inputs, by name, in the order of the graph."""
    alive = {id(value) for value in model.graph.inputs}
    found = {}
    for node in model.graph:
        if not any(value is not None and id(value) in alive for value in node.inputs):
            continue
        for value in node.outputs:
            alive.add(id(value))
            if value.dtype is not None and value.dtype.is_floating_point():
                found[value.name or ""] = value
    return found


_ENDS = (
    *("BatchNormalization", "Clip", "Elu", "Gelu", "HardSwish", "LayerNormalization", "LeakyRelu"),
    *("PRelu", "RMSNormalization", "Relu"),
)
"""Operators behind which a block may end; so may Add and Mul of two computed tensors."""


def _ends_block(node: ir.Node) -> bool:
    if node.op_type in ("Add", "Mul"):
        return all(const_tensor(value) is None for value in node.inputs)
    return node.op_type in _ENDS


_FIRST = (
    *("AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "GlobalAveragePool"),
    *("InstanceNormalization", "MaxPool", "PRelu", "Resize"),
)
_LAST = ("Gemm", "LayerNormalization", "MatMul", "RMSNormalization")
_ALONG = ("Add", "Clip", "Gelu", "HardSwish", "LeakyRelu", "Mul", "Relu", "Sigmoid")
_FAR = 4
"""Operators along which is looked for one that tells where the channels are."""


def _channel_axis(value: ir.Value) -> int | None:
    """The axis of the channels, by who makes and who reads the tensor; None if nobody tells."""
    shape = dimensions(value.shape)
    if shape is None:
        return None
    last = len(shape) - 1
    if _operator(value) in (*_FIRST, *_LAST):
        return 1 if _operator(value) in _FIRST else last
    for operator in (*_readers(value, _FAR), *_makers(value, _FAR)):
        if operator in _FIRST:
            return 1
        if operator in _LAST:
            return last
    return 1 if len(shape) == 4 and _reduced(value) else None


def _readers(value: ir.Value, far: int) -> Iterator[str]:
    for node, _ in value.uses():
        yield node.op_type
        if far and node.op_type in _ALONG:
            yield from _readers(node.outputs[0], far - 1)


def _makers(value: ir.Value, far: int) -> Iterator[str]:
    node = value.producer()
    if node is None:
        return
    yield node.op_type
    if far and node.op_type in _ALONG:
        for source in node.inputs:
            if source is not None:
                yield from _makers(source, far - 1)


def _reduced(value: ir.Value) -> bool:
    return any(operator.startswith("Reduce") for operator in _readers(value, 0))


def _widths(
    ours: Sequence[Dimension], theirs: Sequence[Dimension] | None, axis: int
) -> tuple[int, int] | None:
    """Channels of both; None where more than these differs, or they are not known."""
    if theirs is None or len(ours) != len(theirs) or not axis < len(ours):
        return None
    if any(a != b for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if i not in (0, axis)):
        return None
    ours_there, theirs_there = ours[axis], theirs[axis]
    if isinstance(ours_there, int) and isinstance(theirs_there, int):
        return ours_there, theirs_there
    return None


# attention


def find_attention(student: ir.Model, teacher: ir.Model) -> tuple[list[AttentionPair], list[str]]:
    """Attention maps of one name in both graphs: Softmax of four axes inside. Shapes are inferred.

    Returns:
        The pairs, and names of maps whose numbers of heads differ.
    """
    theirs = {name: value for name, value in _computed(teacher).items() if _is_map(value)}
    found, different = [], []
    for name, value in _computed(student).items():
        if name not in theirs or not _is_map(value):
            continue
        other = theirs[name]
        shape, shape_there = dimensions(value.shape), dimensions(other.shape)
        assert shape is not None and shape_there is not None, "maps have four axes"
        if shape[1:] != shape_there[1:]:
            different.append(name)
            continue
        node = value.producer()
        assert node is not None, "a Softmax made it"
        scores, scores_there = scores_behind(value, "Softmax"), scores_behind(other, "Softmax")
        found.append(AttentionPair(scores, scores_there, _softmax_axis(node)))
    return found, different


def _is_map(value: ir.Value) -> bool:
    shape = dimensions(value.shape)
    inside = _operator(value) == "Softmax" and not value.is_graph_output()
    return inside and shape is not None and len(shape) == 4
