"""A journal as lines: each event with the tool and the key of its call, for `events` and for whoever reads along."""

from __future__ import annotations

import json
from typing import Any

from perdure.core.events import Event, ToolCallInitiated, encode_body
from perdure.inspect.words import iso, sentence


class Timeline:
    """Turns the events of one run, given in order from the first, into lines."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.tools: dict[int, str] = {}
        self.keys: dict[int, str] = {}

    def learn(self, event: Event) -> None:
        """Take the names out of an intent; every later event of its call is told with them."""
        if event.call is not None and isinstance(event.body, ToolCallInitiated):
            self.tools[event.call] = event.body.tool
            self.keys[event.call] = event.body.key

    def say(self, event: Event) -> str:
        """The event as a sentence."""
        self.learn(event)
        return sentence(event, self.tools)

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
            "tool": None if call is None else self.tools.get(call),
            "cause": event.cause,
            "key": None if call is None else self.keys.get(call),
            "epoch": event.epoch,
            "data": json.loads(encode_body(event.body)),
            "hash": hash_.hex(),
        }
