"""A journal as lines: each event with the tool and the key of its call, for `events` and for whoever reads along."""

from __future__ import annotations

import json
from typing import Any

from perdure.core.events import ApprovalRequested, ChildStarted, Event, RunCreated, ToolCallInitiated, ToolCallProposed, encode_body
from perdure.core.identity import CallKeys
from perdure.inspect.models import Load
from perdure.inspect.sentences import sentence
from perdure.inspect.words import iso


class Names:
    """What the calls of one run are about, learned from its events in order."""

    def __init__(self) -> None:
        self.tools: dict[int, str] = {}
        self.keys: dict[int, str] = {}
        self._keys = CallKeys("", "")  # before the run's first event there is no call
        self.calls: dict[int, str] = {}  # also those that are no tool's: the action of an approval, the agent of a child
        self.began: dict[int, int] = {}  # when the last attempt did

    def learn(self, event: Event) -> None:
        """Take the names out of whatever begins a call; every later event of the call is told with them."""
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
    """Turns the events of one run, given in order from the first, into lines. `load` brings what lies in the blob store."""

    def __init__(self, run_id: str, load: Load | None = None) -> None:
        self.run_id = run_id
        self._load = load
        self.names = Names()

    def learn(self, event: Event) -> None:
        """Pass over an event whose line nobody wants."""
        self.names.learn(event)

    def say(self, event: Event) -> str:
        """The event as a sentence."""
        self.learn(event)
        return sentence(event, self.names.calls, self.names.began, self._load)

    def record(self, event: Event, hash_: bytes) -> dict[str, Any]:
        """The event as one JSON object; `data` is its body as it lies in the journal."""
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
