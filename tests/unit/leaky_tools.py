"""An agent whose tools tell their secret in odd places, for test_secrets_everywhere.py."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from perdure import Approval, ArtifactNotSaved, Call, Outcome, Run, Secret, ToolFailed, agent, tool

NAME = "odd-key"
log = logging.getLogger("tests.leaky")

FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "repr": repr,
    "json": json.dumps,
    "json in json": lambda value: json.dumps({"inner": json.dumps({"key": value})}),
    "url": lambda value: f"https://example.org/?key={quote(value, safe='')}",
    "base64": lambda value: "Basic " + base64.b64encode(f"ann:{value}".encode()).decode(),
    "hex": lambda value: value.encode("utf-8", "surrogatepass").hex(),
    "bytes": lambda value: repr(value.encode("utf-8", "surrogatepass")),
    "at the end of a long text": lambda value: "x" * 1_990 + value,
    "large": lambda value: "y" * 70_000 + value + "z" * 70_000,
}


class Told(Exception):
    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.request = {"headers": {"Authorization": said}}


def _raise(said: str, call: Call) -> Any:
    raise Told(said)


def _cause(said: str, call: Call) -> Any:
    try:
        raise KeyError(said)
    except KeyError as error:
        raise Told("it failed") from error


def _group(said: str, call: Call) -> Any:
    one = ValueError(said)
    one.add_note(said)
    group = ExceptionGroup("several", [one, ExceptionGroup(said, [OSError(5, said)])])
    group.add_note(said)
    raise group


def _class(said: str, call: Call) -> Any:
    raise type(f"Told{said[:100]}".replace("\0", ""), (Exception,), {})


def _result(said: str, call: Call) -> Any:
    return {"deep": [{"key": said, said: [said]}, said]}


def _unrecordable(said: str, call: Call) -> Any:
    return {(said,): 1}


def _heartbeat(said: str, call: Call) -> Any:
    call.heartbeat({"now": said[:20_000], said[:5_000]: [1]})
    raise RuntimeError("after a heartbeat")


def _spend(said: str, call: Call) -> Any:
    call.spend(usd=0, model=said[:150])
    return "spent"


def _log(said: str, call: Call) -> Any:
    log.warning("I say %s and %r", said, [said], extra={"odd": {"key": said}})
    try:
        raise Told(said)
    except Told:
        log.exception("failed", stack_info=True)
    return "logged"


PLACES: dict[str, Callable[[str, Call], Any]] = {
    "exception": _raise,
    "cause": _cause,
    "group": _group,
    "class": _class,
    "result": _result,
    "unrecordable": _unrecordable,
    "heartbeat": _heartbeat,
    "spend": _spend,
    "log": _log,
}


@tool(effect="read")
async def leaks(place: str, form: str, key: Secret, call: Call) -> Any:
    return PLACES[place](FORMS[form](key.reveal()), call)


@tool(effect="read")
def leaks_sync(place: str, form: str, key: Secret, call: Call) -> Any:
    return PLACES[place](FORMS[form](key.reveal()), call)


@tool(effect="transaction")
def leaks_inside(place: str, form: str, key: Secret, call: Call) -> Any:
    return PLACES[place](FORMS[form](key.reveal()), call)


@tool(effect="once", timeout=1, settle=0)
async def doubtful(form: str, key: Secret) -> str:
    raise TimeoutError(FORMS[form](key.reveal()))


@doubtful.reconcile
async def _(form: str, key: Secret) -> Outcome:
    return Outcome.happened({"found": FORMS[form](key.reveal())})


@tool(effect="read")
async def saves(form: str, key: Secret, call: Call) -> Any:
    try:
        return await call.save(FORMS[form](key.reveal()).encode("utf-8", "surrogatepass"), content_type="text/plain")
    except ArtifactNotSaved as error:
        return str(error)


@tool(effect="once", approval=Approval(by=("ann",), when=lambda key: f"it uses {key}"))
async def asked(key: Secret) -> str:
    return key.reveal()


TOOLS = {"async": leaks, "sync": leaks_sync, "transaction": leaks_inside}


@agent(version="1")
async def leaky_child(run: Run, key: Secret, form: str) -> Any:
    run.status(f"I have {key}")
    return await leaks("result", form, key)


@agent(version="1")
async def leaky(run: Run, steps: list[list[str]], form: str) -> Any:
    key = Secret(NAME)
    said: list[Any] = []
    for kind, place, one in steps:
        try:
            said.append(await TOOLS[kind](place, one, key))
        except ToolFailed as error:
            run.note(f"{error}")
            said.append(error.message)
    said += [await leaky_child(key, form), await doubtful(form, key), await saves(form, key)]
    run.decide({"choice": said[-1:]}, reason=f"because of {key}")
    await run.receive("go")
    await asked(key)
    raise RuntimeError(f"at last {said}"[:500])
