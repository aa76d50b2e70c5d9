"""Which steps of a plan wait for each other. Everything here takes time in proportion to the plan: a model may have written it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

Edges = Mapping[str, Sequence[str]]


def circles(edges: Edges) -> list[list[str]]:
    """One circle, `["a", "b", "a"]`, for every knot in a graph."""
    return [circle(edges, knot) for knot in knots(edges)]


def knots(edges: Edges) -> list[list[str]]:
    """The groups of names of which each leads to all others of its group, in the order of the graph (Tarjan, without recursion)."""
    found: list[list[str]] = []
    order = {name: place for place, name in enumerate(edges)}
    entered: dict[str, int] = {}
    lowest: dict[str, int] = {}  # the earliest name that one can get back to
    waiting: dict[str, None] = {}  # entered, and in no group yet
    for first in edges:
        trail = _enter(first, edges, entered, lowest, waiting) if first not in entered else []
        while trail:
            name, others = trail[-1]
            other = next(others, None)
            if other is None:
                trail.pop()
                if trail:
                    lowest[trail[-1][0]] = min(lowest[trail[-1][0]], lowest[name])
                if lowest[name] == entered[name]:
                    group = _group(waiting, name)
                    found += [sorted(group, key=order.__getitem__)] if len(group) > 1 else []
            elif other not in edges:
                continue
            elif other not in entered:
                trail += _enter(other, edges, entered, lowest, waiting)
            elif other in waiting:
                lowest[name] = min(lowest[name], entered[other])
    return sorted(found, key=lambda group: order[group[0]])


def _enter(
    name: str, edges: Edges, entered: dict[str, int], lowest: dict[str, int], waiting: dict[str, None]
) -> list[tuple[str, Iterator[str]]]:
    entered[name] = lowest[name] = len(entered)
    waiting[name] = None
    return [(name, iter(edges[name]))]


def _group(waiting: dict[str, None], root: str) -> list[str]:
    group: list[str] = []
    while not group or group[-1] != root:
        group.append(waiting.popitem()[0])
    return group


def circle(edges: Edges, knot: Sequence[str]) -> list[str]:
    """The shortest way from the first name of a knot back to it."""
    first, inside = knot[0], set(knot)
    came_from: dict[str, str] = {}
    ahead = deque([first])
    while first not in came_from:
        name = ahead.popleft()
        for other in edges[name]:
            if other in inside and other != name and other not in came_from:
                came_from[other] = name
                ahead.append(other)
    way = [first, came_from[first]]
    while way[-1] != first:
        way.append(came_from[way[-1]])
    return way[::-1]
