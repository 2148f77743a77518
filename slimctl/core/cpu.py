"""What the processor can do."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_FEATURES = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
)
"""Instruction sets that decide how fast integer kernels are, as /proc/cpuinfo spells them."""


def cpu_features(cpuinfo: str) -> list[str] | None:
    """Instruction sets among those that matter, from the text of /proc/cpuinfo.

    Returns:
        None when the text says nothing about them.
    """
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            present = set(value.split())
            return [feature for feature in _FEATURES if feature in present]
    return None


def has_dot_products(features: Iterable[str]) -> bool:
    """Whether an x86 processor adds four byte products at a time in 32 bits (VNNI)."""
    return bool({"avx512_vnni", "avx_vnni"} & set(features))


def read_cpuinfo() -> str:
    """The text of /proc/cpuinfo; empty where there is none."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@cache
def products_saturate() -> bool:
    """Whether this processor adds pairs of uint8 x int8 products in 16 bits: x86 without VNNI.

    False where nothing is known about it.
    """
    features = cpu_features(read_cpuinfo())
    if platform.machine() not in ("x86_64", "AMD64") or features is None:
        return False
    return not has_dot_products(features)


def available_cores() -> int:
    """Cores that this process may use: containers and taskset allow a process fewer."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
