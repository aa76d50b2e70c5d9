"""A journal as lines, for `perdure events`: each event with the tool and the key of its call."""

from __future__ import annotations

import json
from typing import Any

from perdure.core.events import ApprovalRequested, ChildStarted, Event, RunCreated, ToolCallInitiated, ToolCallProposed, encode_body
from perdure.core.identity import CallKeys
from perdure.inspect.text import Load, iso, sentence


class EventNames:
    """The tools, keys and names of a run's calls. They are collected from the run's events, which come in order."""

    def __init__(self) -> None:
        self.tools: dict[int, str] = {}
        self.keys: dict[int, str] = {}
        self._keys = CallKeys("", "")  # replaced at the run's first event; no call comes before it
        self.calls: dict[int, str] = {}  # call → its tool, the action of its approval, or the agent of its child
        self.began: dict[int, int] = {}  # call → when its last attempt began

    def learn(self, event: Event) -> None:
        """Learn the names from the event that begins a call. Later events of the call do not have these names."""
        if event.call is None:
            if isinstance(event.body, RunCreated):
                self._keys = CallKeys.of(event.body)
            return
        match event.body:
            case ToolCallInitiated(tool=tool, key=key) | ToolCallProposed(tool=tool, key=key):
                self.tools[event.call] = self.calls[event.call] = tool
                self.keys[event.call] = key or self._keys.key(event.call, tool)
                self.began[event.call] = event.ts
            case ApprovalRequested(action=action):
                self.calls.setdefault(event.call, action)
            case ChildStarted(agent=agent):
                self.calls[event.call] = agent


class Timeline:
    """Turns the events of one run into lines.

    The events must come in order, from the first event on. `load` reads payloads from the blob store.
    """

    def __init__(self, run_id: str, load: Load | None = None) -> None:
        self.run_id = run_id
        self._load = load
        self.names = EventNames()

    def learn(self, event: Event) -> None:
        """Learn the names from an event that gets no line."""
        self.names.learn(event)

    def say(self, event: Event) -> str:
        """The event as a sentence."""
        self.learn(event)
        return sentence(event, self.names.calls, self.names.began, self._load)

    def record(self, event: Event, hash_: bytes) -> dict[str, Any]:
        """The event as one JSON object. `data` is the body of the event, as in the journal."""
        self.learn(event)
        call = event.call
        return {
            "run_id": self.run_id,
            "seq": event.seq,
            "event_id": event.event_id,
            "type": event.type,
            "ts": iso(event.ts),
            "call": call,
            "tool": None if call is None else self.names.tools.get(call),
            "cause": event.cause,
            "key": None if call is None else self.names.keys.get(call),
            "epoch": event.epoch,
            "data": json.loads(encode_body(event.body)),
            "hash": hash_.hex(),
        }
