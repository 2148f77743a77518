"""Where an imported network comes from, and what of it may run before the user says so.

A state dict is data: ``torch.load(weights_only=True)`` builds tensors and nothing else. Every other
file is a program. A pickled module runs what its pickle names. ``torch.export.load`` evaluates the
sizes of a ``.pt2`` file as Python (sympy.sympify), and unpickles its sample inputs without
restriction when the restricted way fails; TorchScript code can write files (``torch.save`` in a
forward). All three were tried with torch 2.13; hence none is opened before the user trusts it.
"""

from __future__ import annotations

import inspect
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimctl.core.contract import Feeds
from slimctl.core.errors import OptionError, SourceError, UnsupportedModelError
from slimctl.data.callables import CALLABLE_PATTERN, load_function, user_code_error

_MOST_NAMED = 5  # names of a kind in one message
_PICKLE = b"\x80"  # a pickle starts with its protocol


class Kind(StrEnum):
    """What a source is."""

    MODULE = "module"
    SCRIPT = "TorchScript"
    PROGRAM = "exported program"
    STATE = "state dict"
    PICKLE = "pickled module"


@dataclass(frozen=True)
class Network:
    """A network that can be run and exported.

    Attributes:
        kind: What it was loaded from.
        exported: What torch's exporters take.
        callable: What is run; the same, but for exported programs.
        state: Its tensors by their names in the state dict.
    """

    kind: Kind
    exported: Any
    callable: Callable[..., Any]
    state: Mapping[str, Tensor]

    def parameters(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """How inputs are passed: by place, and by name.

        Inputs that are all called as parameters of ``forward`` are passed as these, in its order.
        Else they are passed by place, in the order given.
        """
        known = self._known()
        if not set(names) <= set(known):
            return list(names), []
        places: list[str] = []
        for name, kind in known.items():
            if name not in names or kind is inspect.Parameter.KEYWORD_ONLY:
                break
            places.append(name)
        return places, [name for name in known if name in names and name not in places]

    def _known(self) -> dict[str, Any]:
        """Parameters of ``forward`` by name, and how each is passed."""
        if self.kind is not Kind.MODULE:
            return {}  # both forms take their inputs by place
        parameters = inspect.signature(self.exported.forward).parameters.values()
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {p.name: p.kind for p in parameters if p.kind in named}

    def run(self, feeds: Feeds) -> Any:
        """What the network returns, whatever its form.

        Raises:
            UnsupportedModelError: The network fails on these inputs.
        """
        places, named = self.parameters(list(feeds))
        tensors = {name: torch.from_numpy(array.copy()) for name, array in feeds.items()}
        try:
            with torch.no_grad():
                return self.callable(
                    *(tensors[name] for name in places), **{name: tensors[name] for name in named}
                )
        except Exception as error:  # the user's code may raise anything
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feeds.items())
            raise UnsupportedModelError(
                f"The network fails on the inputs {shapes}: {first_line(error)}",
                where="forward",
                fix="correct --input: names as in forward, or all inputs in its order",
            ) from error


def first_line(error: BaseException) -> str:
    """The exception that began it, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def output_tensors(returned: Any) -> list[Tensor]:
    """The tensors of what a network returned, in the order in which both exporters give them.

    Raises:
        UnsupportedModelError: There is none, or something else is among them.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(returned) if leaf is not None]
    other = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    if other or not leaves:
        found = type(other[0]).__name__ if other else "nothing"
        raise UnsupportedModelError(
            f"The network returns {found} where tensors are wanted",
            where="forward",
            fix="return tensors, or tuples, lists or dictionaries of tensors",
        )
    return leaves


def to_arrays(returned: Any) -> list[NDArray[Any]]:
    """The same as arrays.

    Raises:
        UnsupportedModelError: numpy has no such type.
    """
    try:
        return [tensor.detach().cpu().numpy() for tensor in output_tensors(returned)]
    except TypeError as error:
        raise UnsupportedModelError(
            f"The outputs cannot be compared: {first_line(error)}",
            where="forward",
            fix="return floats, integers or booleans that numpy has: output.float()",
        ) from error


def load_network(source: str, *, weights: Path | None, trust: bool) -> Network:
    """Opens a source, in eval mode and on the CPU.

    Args:
        source: ``module:function``, or a file.
        weights: A state dict for the network of ``module:function``.
        trust: Files may run code.

    Raises:
        SourceError: It cannot be opened, is no network, or needs ``--trust``.
        OptionError: ``--weights`` with a file.
    """
    if CALLABLE_PATTERN.fullmatch(source) and not Path(source).exists():
        module = _own_module(source)
        if weights is not None:
            _fill(module, weights)
        return _network(module)
    kind = file_kind(Path(source))
    if kind is Kind.STATE:
        raise _no_network(source)
    if weights is not None:
        raise OptionError(
            "--weights",
            f"'{source}' has its weights with it",
            fix="leave --weights out, or give module:function",
        )
    if not trust:
        raise SourceError(
            source,
            f"The file holds a program ({kind.value}), which can do anything when it is opened",
            fix="add --trust if you made it or trust who did; else give module:function and"
            " --weights",
        )
    return _opened(Path(source), kind)


def _network(module: nn.Module) -> Network:
    module = module.to("cpu").eval()
    return Network(Kind.MODULE, module, module, module.state_dict())


def _own_module(source: str) -> nn.Module:
    """The user's module. A class or a function is called without arguments."""
    function = load_function(source, "or give the path of a file")
    if isinstance(function, nn.Module):
        return function
    try:
        module = function()
    except Exception as error:  # the user's code may raise anything
        raise user_code_error(source, error) from error
    if not isinstance(module, nn.Module):
        raise SourceError(
            source,
            f"The function returned {type(module).__name__}, not a torch.nn.Module",
            fix="return the network itself, with its weights loaded or with --weights",
        )
    return module


def file_kind(path: Path) -> Kind:
    """What a file holds, without running anything of it. Its name does not matter.

    Raises:
        SourceError: There is none, or torch did not write it.
    """
    if not path.is_file():
        raise SourceError(str(path), "There is no such file", fix="give a file, or module:function")
    if zipfile.is_zipfile(path):
        found = _archive_kind(path)
        if found is not None:
            return found
    elif not _is_pickle(path):
        raise _foreign(path)
    return Kind.PICKLE if _state_dict(path) is None else Kind.STATE


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(1) == _PICKLE


def _archive_kind(path: Path) -> Kind | None:
    """None for archives of torch.save, which hold a state dict or a pickled module."""
    with zipfile.ZipFile(path) as archive:
        names = [name.rpartition("/")[2] for name in archive.namelist()]
    if "archive_format" in names or "serialized_exported_program.json" in names:
        return Kind.PROGRAM
    if "constants.pkl" in names:
        return Kind.SCRIPT
    if "data.pkl" not in names:
        raise _foreign(path)
    return None


def _foreign(path: Path) -> SourceError:
    return SourceError(
        str(path),
        "The file is not one that torch writes",
        fix="give module:function, or a file of torch.export.save, torch.jit.save or torch.save",
    )


def _state_dict(path: Path) -> dict[str, Tensor] | None:
    """The tensors of a file, None where it holds something else. Runs no code of it.

    Raises:
        SourceError: It cannot be read.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # it names something that is no tensor
        return None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise SourceError(
            str(path), f"The file cannot be read: {first_line(error)}", fix="copy the file again"
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]  # a checkpoint, as trainers write it
    if not isinstance(found, Mapping) or not found:
        return None
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return tensors if len(tensors) == len(found) else None


def _no_network(source: str) -> SourceError:
    return SourceError(
        source,
        "The file holds a state dict: weights without their network",
        fix=f"give the network: slimctl import module:function --weights {source}",
    )


def _opened(path: Path, kind: Kind) -> Network:
    """A file that the user trusts."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)  # a pickle names classes, and may name the user's own
    try:
        return _loaders()[kind](path)
    except SourceError:
        raise
    except Exception as error:  # the file may run anything
        raise SourceError(
            str(path),
            f"The {kind.value} cannot be opened: {first_line(error)}",
            fix="run the command where its classes can be imported, or save it again with the"
            " installed torch",
        ) from error


def _loaders() -> dict[Kind, Callable[[Path], Network]]:
    return {Kind.SCRIPT: _script, Kind.PROGRAM: _program, Kind.PICKLE: _pickled}


def _script(path: Path) -> Network:
    module = torch.jit.load(str(path), map_location="cpu").eval()
    return Network(Kind.SCRIPT, module, module, module.state_dict())


def _program(path: Path) -> Network:
    program = torch.export.load(str(path))
    return Network(Kind.PROGRAM, program, program.module(), program.state_dict)


def _pickled(path: Path) -> Network:
    found = torch.load(path, map_location="cpu", weights_only=False)
    if not isinstance(found, nn.Module):
        raise SourceError(
            str(path),
            f"The file holds a {type(found).__name__}, not a torch.nn.Module",
            fix="give the network with module:function, and its state dict with --weights",
        )
    return _network(found)


def _fill(module: nn.Module, path: Path) -> None:
    """Loads weights into a network: all of them, and nothing else.

    Raises:
        SourceError: The file holds no state dict, or not the network's.
    """
    kind = file_kind(path)
    tensors = _state_dict(path) if kind is Kind.STATE else None
    if tensors is None:
        raise SourceError(
            str(path),
            f"The file holds no state dict but a {kind.value}",
            fix="save the weights alone: torch.save(network.state_dict(), path)",
        )
    own = module.state_dict()
    problems = [
        _named("lacks", [name for name in own if name not in tensors]),
        _named("has unknown", [name for name in tensors if name not in own]),
        _named(
            "has other shapes for",
            [
                f"{name} {list(tensor.shape)} instead of {list(own[name].shape)}"
                for name, tensor in tensors.items()
                if name in own and tensor.shape != own[name].shape
            ],
        ),
    ]
    if any(problems):
        raise SourceError(
            str(path),
            f"The weights are not the network's: the file {'; it '.join(filter(None, problems))}",
            fix="build the network as it was when its weights were saved",
        )
    module.load_state_dict(tensors, strict=True)


def _named(verb: str, names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    listed = ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{verb} {listed}" if names else ""
