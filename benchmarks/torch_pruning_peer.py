"""Torch-Pruning behind one command, for the Python that ``PEERS_PYTHON`` names.

``python -m benchmarks.torch_pruning_peer WEIGHTS.pt FOLDER SHARE ...`` prunes a network of
:mod:`benchmarks.fashion` to each share of its multiply-accumulates and writes
``FOLDER/NAME-SHARE.onnx``. Importance and everything else are Torch-Pruning's defaults
(``BasePruner`` with ``GroupMagnitudeImportance``); its pruning ratio is searched, since it takes
channels and not multiply-accumulates. Needs torch, onnx and torch-pruning.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch_pruning  # type: ignore[import-not-found]  # only there

from benchmarks.fashion import CLASSES, NETWORKS, export

_TRIES = 12


def _macs(model: torch.nn.Module) -> int:
    """Of convolutions and linear layers at one image."""
    total = 0

    def count(module: Any, inputs: Any, output: Any) -> None:
        nonlocal total
        del inputs
        positions = output.shape[2] * output.shape[3] if output.dim() == 4 else 1
        total += module.weight.numel() * positions

    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, kinds)]
    with torch.no_grad():
        model(torch.zeros(1, 1, 28, 28))
    for hook in hooks:
        hook.remove()
    return total


def _pruned(model: torch.nn.Module, ratio: float) -> torch.nn.Module:
    clone = copy.deepcopy(model)
    ignored = [
        module
        for module in clone.modules()
        if isinstance(module, torch.nn.Linear) and module.out_features == CLASSES
    ]
    pruner = torch_pruning.pruner.BasePruner(
        clone,
        torch.zeros(1, 1, 28, 28),
        importance=torch_pruning.importance.GroupMagnitudeImportance(),
        pruning_ratio=ratio,
        ignored_layers=ignored,
    )
    pruner.step()
    return clone


def main(module: Path, folder: Path, shares: list[float]) -> None:
    """Writes one network per share."""
    model = NETWORKS[module.stem]().eval()
    model.load_state_dict(torch.load(module, weights_only=True))
    full = _macs(model)
    for share in shares:
        low, high = 0.0, 1.0
        best = model
        for _ in range(_TRIES):
            ratio = (low + high) / 2
            tried = _pruned(model, ratio)
            if _macs(tried) <= share * full:
                best, high = tried, ratio
            else:
                low = ratio
        export(best, folder / f"{module.stem}-{share:g}.onnx")
        print(f"{share:g}: ratio {high:.3f}, {_macs(best) / full:.3f} of the MACs", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [float(text) for text in sys.argv[3:]])
