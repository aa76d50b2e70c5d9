"""Which steps of a plan wait for each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def circles(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The circles in a graph, one for every edge that closes one: `["a", "b", "a"]`. No depth of recursion stands for its size."""
    found: list[list[str]] = []
    entered: set[str] = set()
    left: set[str] = set()
    for first in edges:
        if first in entered:
            continue
        entered.add(first)
        trail: list[tuple[str, Iterator[str]]] = [(first, iter(edges[first]))]
        while trail:
            name, others = trail[-1]
            other = next(others, None)
            if other is None:
                left.add(name)
                trail.pop()
            elif other == name or other not in edges:
                continue
            elif other not in entered:
                entered.add(other)
                trail.append((other, iter(edges[other])))
            elif other not in left:
                names = [one for one, _ in trail]
                found.append([*names[names.index(other) :], other])
    return found
