"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from slimctl.graph.channels.site import Site


class Rule(NamedTuple):
    """How channels go through one operator.

    Attributes:
        follow: Reads the labels of the inputs and says what follows.
        computes: The operator computes channels of its own: it is asked even where none of its
            inputs has labels.
    """

    follow: Callable[[Site], None]
    computes: bool = False
