"""Minimum cut: which nodes compute in float32 so that Casts are fewest.

Every site (a node) is narrow or full. A value costs one Cast if its producer is narrow and some
reader is full, and one if its producer is full and some reader is narrow, however many readers
there are. That is a minimum cut in a graph with one auxiliary vertex per value and direction, and
is found exactly by maximum flow (Dinic, "Algorithm for solution of a problem of maximum flow in
networks with power estimation", 1970).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

CAST_COST: Final = 4
"""What a Cast costs, in units of a cheap node that computes in float32: a Cast is a node more, and
an element-wise float32 node only moves twice the bytes."""
FORCED: Final = 1 << 40
"""Cost of what must not be."""


class Traffic(NamedTuple):
    """One value.

    Attributes:
        producer: Number of the site that writes it.
        readers: Numbers of the sites that read it.
    """

    producer: int
    readers: Sequence[int]


def full_sites(full: Sequence[bool], costs: Sequence[int], values: Iterable[Traffic]) -> list[bool]:
    """The sites that should compute in float32; as few as possible where it makes no difference.

    Args:
        full: Sites that must.
        costs: What it costs to let a site compute in float32 that need not.
        values: Who writes and reads each value.
    """
    source, sink = len(full), len(full) + 1
    flow = _Flow(len(full) + 2)
    for site, (must, cost) in enumerate(zip(full, costs, strict=True)):
        if must:
            flow.edge(source, site, FORCED)
        else:
            flow.edge(site, sink, cost)
    for value in values:
        up, down = flow.vertex(), flow.vertex()
        flow.edge(up, value.producer, CAST_COST)
        flow.edge(value.producer, down, CAST_COST)
        for reader in set(value.readers):
            flow.edge(reader, up, FORCED)
            flow.edge(down, reader, FORCED)
    return flow.side_of(source, sink)[: len(full)]


class _Flow:
    """A directed graph with capacities; edges are stored beside their reverse, at ``edge ^ 1``."""

    def __init__(self, vertices: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(vertices)]
        self.head: list[int] = []
        self.left: list[int] = []

    def vertex(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def edge(self, start: int, end: int, capacity: int) -> None:
        for a, b, room in ((start, end, capacity), (end, start, 0)):
            self.edges[a].append(len(self.head))
            self.head.append(b)
            self.left.append(room)

    def side_of(self, source: int, sink: int) -> list[bool]:
        """Whether each vertex is on the source's side of the minimum cut nearest to the source."""
        while (levels := self._levels(source))[sink] >= 0:
            tried = [0] * len(self.edges)
            while path := self._path(source, sink, levels, tried):
                room = min(self.left[edge] for edge in path)
                for edge in path:
                    self.left[edge] -= room
                    self.left[edge ^ 1] += room
        return [level >= 0 for level in levels]

    def _levels(self, source: int) -> list[int]:
        """Number of edges from the source, -1 where no room is left on any way."""
        levels = [-1] * len(self.edges)
        levels[source] = 0
        pending = deque([source])
        while pending:
            vertex = pending.popleft()
            for edge in self.edges[vertex]:
                end = self.head[edge]
                if self.left[edge] and levels[end] < 0:
                    levels[end] = levels[vertex] + 1
                    pending.append(end)
        return levels

    def _path(self, source: int, sink: int, levels: list[int], tried: list[int]) -> list[int]:
        """Edges of one shortest way with room on it; empty when there is none left."""
        path: list[int] = []
        vertex = source
        while vertex != sink:
            edges = self.edges[vertex]
            while tried[vertex] < len(edges):
                edge = edges[tried[vertex]]
                end = self.head[edge]
                if self.left[edge] and levels[end] == levels[vertex] + 1:
                    break
                tried[vertex] += 1
            else:
                if not path:
                    return []
                vertex = self.head[path.pop() ^ 1]
                tried[vertex] += 1
                continue
            path.append(edge)
            vertex = end
        return path
