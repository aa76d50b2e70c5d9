"""Secrets: the journal has the name, only the tool gets the value, and the value is nowhere else (G15)."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from tests.unit.drive_tools import SETTINGS, ManualClock, run, until
from tests.unit.inspect_tools import url_of
from tests.unit.postgres_tools import empty

from perdure import (
    Approval,
    ArtifactNotSaved,
    Call,
    InvalidInput,
    NotEncodable,
    Outcome,
    Perdure,
    Plan,
    ReAct,
    RetryLater,
    Run,
    Secret,
    Settings,
    Step,
    ToolFailed,
    agent,
    ref,
    tool,
)
from perdure import sync as blocking
from perdure.config import load_settings
from perdure.core.events import ApprovalRequested, RunCreated, ToolCallFailed, ToolCallInitiated, encode_body
from perdure.core.failures import describe
from perdure.core.redaction import Scrubber
from perdure.core.state import payloads
from perdure.errors import NeedsAttention, NotReady, NotSent
from perdure.logs import JsonFormatter, RunFilter
from perdure.models import Answer, Scripted, ToolUse
from perdure.store.api import ApprovalFilter
from perdure.testing.lab.counting import _shown
from perdure.tool.secret import FromFolder, from_environment, resolve, source_of

VALUE = "sk_live_51Hq+Zz/9Tq=w"
NAME = "stripe-key"
MARK = "<secret stripe-key>"


def known(name: str) -> str | None:
    return {NAME: VALUE, "other": "another-secret-8831"}.get(name)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(tmp_path / "s.db") if request.param == "sqlite" else empty(request.getfixturevalue("postgres"))


def app_on(url: str, *agents: Any, secrets: Any = known, settings: Settings = SETTINGS) -> Perdure:
    return Perdure(url, agents, settings=settings, secrets=secrets)


def in_memory(*agents: Any, **options: Any) -> Perdure:
    return app_on("sqlite://", *agents, **options)


def everything(app: Perdure, *run_ids: str) -> str:
    """All that is stored about these runs, as text: events as they are written, blobs and rows."""
    pieces: list[str] = []
    for run_id in run_ids:
        pieces.append(repr(app.store.get(run_id)))
        for event in app.store.read(run_id):
            pieces.append(encode_body(event.body).decode())
            pieces += [app.store.blob(str(part.blob)).decode() for part in payloads(event.body) if part.inline is None]
    return "\n".join(pieces)


SEEN: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


@tool(effect="keyed", timeout=30)
async def charge(cents: int, key: Secret) -> str:
    SEEN.append(key.reveal())
    return f"charged {cents}"


@agent(version="1")
async def shop(run: Run, cents: int = 500) -> str:
    return await charge(cents, Secret(NAME))


# -- the reference ------------------------------------------------------------------------------------------------------
def test_the_tool_gets_the_value_and_the_journal_has_the_name(url):
    async def main() -> tuple[list[Any], str]:
        async with app_on(url, shop) as app:
            assert await app.run(shop, id="r") == "charged 500"
            return [event.body for event in app.store.read("r")], everything(app, "r")

    bodies, journal = run(main())
    assert SEEN == [VALUE]
    assert MARK not in journal
    assert VALUE not in journal
    (begun,) = [body for body in bodies if isinstance(body, ToolCallInitiated)]
    assert begun.args is not None
    assert json.loads(begun.args.inline or b"") == {"cents": 500, "key": {"$secret": NAME}}
    if url.startswith("sqlite:///"):
        path = Path(url.removeprefix("sqlite:///"))
        stored = b"".join(one.read_bytes() for one in path.parent.glob(f"{path.name}*") if one.is_file())
        assert NAME.encode() in stored
        assert VALUE.encode() not in stored


@pytest.mark.parametrize("forged", [{"$secret": NAME}, NAME, MARK, VALUE, 5, [Secret(NAME)]])
def test_only_code_makes_a_secret_and_nothing_else_is_taken_for_one(forged):
    with pytest.raises(InvalidInput, match="it takes a Secret, not a") as refused:
        charge.bind((5,), {"key": forged})
    assert VALUE not in str(refused.value)


@agent(version="1")
async def keeper(run: Run, key: Secret) -> str:
    assert repr(key) == MARK
    return await charge(7, key)


@agent(version="1")
async def parent(run: Run) -> str:
    return await keeper(Secret(NAME))


def test_an_agent_and_its_child_pass_a_secret_on(url):
    async def main() -> str:
        async with app_on(url, parent, keeper) as app:
            assert await app.run(parent, id="r") == "charged 7"
            assert await app.run(keeper, Secret(NAME), id="k") == "charged 7"
            return everything(app, "r", "r/1", "k")

    journals = run(main())
    assert SEEN == [VALUE, VALUE]
    assert VALUE not in journals


def test_a_run_that_is_started_with_json_cannot_name_a_secret(tmp_path):
    url = url_of(tmp_path / "s.db")

    async def main() -> None:
        async with app_on(url, keeper) as app:
            for started in (keeper, "keeper"):
                with pytest.raises(InvalidInput, match="it takes a Secret"):
                    await app.start(started, key={"$secret": NAME})

    run(main())

    async def by_name() -> None:
        async with Perdure(url) as without_code:
            await without_code.start("keeper", key={"$secret": NAME}, id="r")
        async with app_on(url, keeper) as app:
            with pytest.raises(Exception, match="it takes a Secret"):
                await app.handle("r").result()

    run(by_name())
    assert SEEN == []


@tool(effect="once")
async def note(anything: Any, words: dict[str, Any]) -> str:
    SEEN.append(repr((anything, words)))
    return "noted"


def test_data_that_looks_like_a_reference_stays_data():
    look = {"$secret": NAME}

    @agent(version="1")
    async def noting(run: Run) -> str:
        return await note(look, {"key": look})

    async def main() -> None:
        async with in_memory(noting) as app:
            await app.run(noting, id="r")

    run(main())
    assert [repr((look, {"key": look}))] == SEEN


@pytest.mark.parametrize("words", [{"key": Secret(NAME)}, {"deep": [{"key": (Secret(NAME),)}]}])
def test_a_secret_inside_another_argument_is_refused_before_the_effect(words):
    with pytest.raises(NotEncodable, match="a whole argument of a tool"):
        note.bind((1, words), {})
    with pytest.raises(NotEncodable, match="a whole argument of a tool"):
        note.bind((Secret(NAME), {}), {})


def test_an_annotation_with_a_secret_inside_is_refused():
    @tool
    async def lists(keys: list[Secret]) -> None: ...

    with pytest.raises(InvalidInput, match="parameter keys: its annotation has no JSON form"):
        lists.bind(([Secret(NAME)],), {})


@pytest.mark.parametrize("name", ["", "../etc/passwd", "a/b", "-x", ".x", "a b", "x" * 65, "a\n", 5, None, VALUE])
def test_a_name_is_a_plain_word_and_a_wrong_one_is_not_shown(name):
    with pytest.raises(InvalidInput, match="the name of a secret") as refused:
        Secret(name)
    assert not isinstance(name, str) or len(name) < 5 or name not in str(refused.value)


def test_a_secret_shows_its_name_only():
    secret = Secret(NAME)
    assert (repr(secret), str(secret), f"{secret}", f"{secret:>25}") == (MARK, MARK, MARK, MARK.rjust(25))
    assert secret == Secret(NAME) == pickle.loads(pickle.dumps(secret)) == copy.deepcopy(secret)
    assert secret != Secret("other")
    assert len({secret, Secret(NAME)}) == 1
    with pytest.raises(TypeError):
        json.dumps(secret)
    assert VALUE not in repr(Scrubber({NAME: VALUE}))


def test_the_reference_is_part_of_the_pin_and_of_no_schema():
    def declared(name: str) -> Any:
        @tool(name="t")
        async def t(cents: int, key: Secret = Secret(name)) -> None: ...  # noqa: B008 (a Secret never changes)

        return t

    assert declared("a").pin() == declared("a").pin() != declared("b").pin()
    assert declared("a").schema()["properties"].keys() == {"cents"}
    assert charge.schema()["required"] == ["cents"]


# -- who may reveal it --------------------------------------------------------------------------------------------------
def test_an_agent_cannot_reveal_a_secret():
    @agent(version="1")
    async def curious(run: Run) -> str:
        return Secret(NAME).reveal()

    async def main() -> None:
        async with in_memory(curious) as app:
            with pytest.raises(Exception, match="an agent passes a secret on; a tool reveals it"):
                await app.run(curious, id="r")

    run(main())


def test_a_tool_reveals_only_its_own_arguments():
    @tool(effect="read")
    async def nosy(key: Secret) -> list[str]:
        said = []
        for name in ("other", NAME):
            try:
                said.append("yes" if Secret(name).reveal() else "")
            except InvalidInput as error:
                said.append(str(error)[:30])
        return said

    @agent(version="1")
    async def asks(run: Run) -> list[str]:
        return await nosy(Secret(NAME))

    async def main() -> Any:
        async with in_memory(asks) as app:
            return await app.run(asks, id="r")

    assert run(main()) == ["secret other is not an argumen", "yes"]
    with pytest.raises(InvalidInput, match="not an argument of this call"):
        Secret(NAME).reveal()


def test_a_thread_that_the_tool_has_started_can_reveal_its_argument():
    import threading

    @tool(effect="read")
    def threaded(key: Secret) -> bool:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(key.reveal()))
        thread.start()
        thread.join()
        return found == [VALUE]

    @agent(version="1")
    async def asks(run: Run) -> bool:
        return await threaded(Secret(NAME))

    async def main() -> Any:
        async with in_memory(asks) as app:
            return await app.run(asks, id="r")

    assert run(main()) is True


def test_a_policy_sees_the_name_and_an_approval_shows_it():
    @tool(effect="once", approval=lambda key: f"uses {key}" if key.name == NAME else False)
    async def asked(key: Secret) -> str:
        return f"used {len(key.reveal())}"

    @tool(effect="once", approval=lambda key: f"uses {key.reveal()}")
    async def nosy(key: Secret) -> str:
        return "used"

    @agent(version="1")
    async def asks(run: Run) -> list[str]:
        return [await asked(Secret("other")), await asked(Secret(NAME)), await nosy(Secret(NAME))]

    async def main() -> list[ApprovalRequested]:
        async with in_memory(asks) as app:
            await app.start(asks, id="r")
            for _ in range(2):
                await app.engine.drive("r", wait=False)
                (row,) = app.store.approvals(ApprovalFilter(run_id="r"))
                await app.approve(row.approval, by="ann")
            await app.engine.drive("r", wait=False)
            assert VALUE not in everything(app, "r")
            return [event.body for event in app.store.read("r") if isinstance(event.body, ApprovalRequested)]

    first, second = run(main())
    assert first.reason == f"uses {MARK}"
    assert b'{"$secret":"stripe-key"}' in (first.input.inline or b"")
    assert "is not an argument of this call" in (second.reason or "")


def test_a_decision_cannot_name_another_secret():
    @tool(effect="once", approval=Approval(editable=("cents", "key")))
    async def edited(cents: int, key: Secret) -> str:
        SEEN.append(key.reveal())
        return "done"

    args = edited.bind((1, Secret(NAME)), {})
    assert edited.edited(args, args.replace(b"1", b"2", 1)) == args.replace(b"1", b"2", 1)
    assert edited.editable_schema()["properties"].keys() == {"cents"}
    with pytest.raises(InvalidInput, match="key may not be edited"):
        edited.edited(args, args.replace(NAME.encode(), b"other"))


def test_recorded_arguments_are_bound_again_with_their_reference():
    args = charge.bind((1, Secret(NAME)), {})
    assert charge.rebind(args) == args
    assert charge.rebind(b'{"cents":1,"key":"x"}') is None


# -- where values come from ---------------------------------------------------------------------------------------------
def test_a_missing_secret_stops_the_run_before_the_effect_and_a_person_goes_on(url, monkeypatch):
    async def main() -> str:
        async with app_on(url, shop, secrets=None) as app:
            with pytest.raises(NeedsAttention, match="secret stripe-key is missing: set PERDURE_SECRET_STRIPE_KEY"):
                await app.run(shop, id="r")
            assert SEEN == []
            monkeypatch.setenv("PERDURE_SECRET_STRIPE_KEY", VALUE)
            await app.unpause("r", by="ann")
            assert await app.handle("r").result() == "charged 500"
            return everything(app, "r")

    assert VALUE not in run(main())
    assert SEEN == [VALUE]
    # The environment of the settings is not disturbed by such variables.
    assert load_settings({}, {"PERDURE_SECRET_STRIPE_KEY": VALUE}, Path("/nowhere")).secrets == ""


def test_a_retry_gets_the_value_of_that_moment():
    values = iter(["first-value-1", "second-value-2"])
    used: list[str] = []

    @tool(effect="keyed")
    async def rotated(key: Secret) -> str:
        used.append(key.reveal())
        if len(used) == 1:
            raise RetryLater(f"key {key.reveal()} is over", after=0.001)
        return key.reveal()

    @agent(version="1")
    async def asks(run: Run) -> str:
        return await rotated(Secret(NAME))

    async def main() -> tuple[Any, str]:
        async with in_memory(asks, secrets=lambda name: next(values)) as app:
            return await app.run(asks, id="r"), everything(app, "r")

    result, journal = run(main())
    assert used == ["first-value-1", "second-value-2"]
    assert result == MARK
    assert "-value-" not in journal


def test_a_file_is_a_secret_without_its_last_line_break(tmp_path):
    (tmp_path / NAME).write_bytes(VALUE.encode() + b"\r\n")
    (tmp_path / "two").write_bytes(b"line one of a key\nline two of a key\n")
    (tmp_path / "bad").write_bytes(b"\xff\xfe\xfd\xfc")
    (tmp_path / "folder").mkdir()
    source = source_of(f"file://{tmp_path}")
    assert isinstance(source, FromFolder)
    assert source(NAME) == VALUE
    assert source("two") == "line one of a key\nline two of a key"
    assert source("absent") is None
    assert source("folder") is None
    with pytest.raises(NotReady, match="is not UTF-8"):
        source("bad")
    assert run(resolve({NAME}, source)).value_of(NAME) == VALUE
    with pytest.raises(NotReady, match="put it into the file"):
        run(resolve({"absent"}, source))


def test_a_resolver_may_be_async_and_its_errors_say_nothing_about_the_value():
    async def slow(name: str) -> str | None:
        await asyncio.sleep(0)
        return known(name)

    def failing(name: str) -> str:
        raise OSError(f"the vault says {VALUE}")

    def looking(name: str) -> str:
        return {"x": "y"}[name]

    assert run(resolve({NAME}, slow)).value_of(NAME) == VALUE
    with pytest.raises(NotSent, match="its resolver raised OSError") as refused:
        run(resolve({NAME}, failing))
    assert VALUE not in repr(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__
    with pytest.raises(NotReady, match="is missing"):
        run(resolve({NAME}, looking))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("abc", "fewer than 4"),
        ("x" * 65_537, "more than 65,536"),
        (b"bytes", "returned a bytes"),
        ("stripe", "is a part of"),
        ("", "is missing"),
    ],
)
def test_a_value_that_cannot_be_kept_out_of_texts_is_refused(value, why):
    with pytest.raises(NotReady, match=why):
        run(resolve({NAME}, lambda name: value))


def test_the_environment_has_a_prefix_so_that_no_other_variable_can_be_named(monkeypatch):
    monkeypatch.setenv("PERDURE_SECRET_A_B_C", "value of a.b-c")
    monkeypatch.setenv("PGPASSWORD", "of the database")
    assert from_environment("a.b-c") == "value of a.b-c"
    assert from_environment("PGPASSWORD") is None


def test_a_settings_file_cannot_choose_code(tmp_path):
    (tmp_path / "perdure.toml").write_text('secrets = "python:os:system"')
    with pytest.raises(InvalidInput, match="a settings file cannot name a function"):
        load_settings({}, {}, tmp_path)
    (tmp_path / "perdure.toml").write_text('secrets = "file:///run/secrets"')
    assert load_settings({}, {}, tmp_path).secrets == "file:///run/secrets"
    assert load_settings({}, {"PERDURE_SECRETS": "python:tests.unit.test_secrets:known"}, tmp_path).secrets.endswith(":known")
    for wrong in ("file://relative", "vault://x", "python:os"):
        with pytest.raises(InvalidInput, match="it must be file:///"):
            load_settings({}, {"PERDURE_SECRETS": wrong}, tmp_path)
    assert run(resolve({NAME}, source_of("python:tests.unit.test_secrets:known"))).value_of(NAME) == VALUE
    with pytest.raises(NotReady, match="cannot be loaded"):
        run(resolve({NAME}, source_of("python:tests.unit.test_secrets:absent")))
    with pytest.raises(InvalidInput, match="a function that takes the name"):
        Perdure("sqlite://", secrets={NAME: VALUE})  # type: ignore[arg-type]


def test_outside_of_a_run_the_value_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("PERDURE_SECRET_STRIPE_KEY", VALUE)
    assert run(charge(1, Secret(NAME))) == "charged 1"
    assert SEEN == [VALUE]


def test_a_run_that_is_cancelled_while_its_secret_is_resolved_has_begun_nothing():
    asked: list[str] = []

    async def never(name: str) -> str:
        asked.append(name)
        await asyncio.Event().wait()
        return ""

    async def main() -> str:
        async with in_memory(shop, secrets=never) as app:
            await app.start(shop, id="r")
            driving = asyncio.create_task(app.engine.drive("r", wait=False))
            await until(lambda: asked)
            await app.cancel("r", by="ann")
            return (await driving).status

    assert run(main()) == "cancelled"
    assert SEEN == []


# -- what the tool says -------------------------------------------------------------------------------------------------
class Telling(Exception):
    pass


def _raises(key: str) -> None:
    raise Telling(f"bad key {key}")


def _long(key: str) -> None:
    raise Telling("x" * 1_995 + key)


def _cut(key: str) -> None:
    raise Telling(f"the key {(key * 3)[:17]}… is wrong")


def _cause(key: str) -> None:
    try:
        raise ValueError(key)
    except ValueError as error:
        raise Telling(f"{key!r}") from error


def _group(key: str) -> None:
    inner = ValueError(key)
    inner.add_note(key)
    raise ExceptionGroup(key, [inner, ExceptionGroup("more", [KeyError(key)])])


def _named(key: str) -> None:
    raise type(f"E{key}", (type(f"Base{key}", (Exception,), {}),), {})(key)


def _code(key: str) -> None:
    exec(compile("raise Telling('x')", f"/tmp/{key}.py", "exec"), {"Telling": Telling})


def _hostile(key: str) -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            return json.dumps({"key": key, "again": json.dumps(key)})

    raise Hostile


@pytest.mark.parametrize("way", [_raises, _long, _cut, _cause, _group, _named, _code, _hostile])
@pytest.mark.parametrize("kind", ["async", "sync", "transaction"])
def test_an_exception_with_the_value_is_recorded_without_it(way, kind):
    async def telling(key: Secret) -> None:
        way(key.reveal())

    def telling_sync(key: Secret) -> None:
        way(key.reveal())

    effect: Any = "transaction" if kind == "transaction" else "read"
    fails = tool(effect=effect, name="fails")(telling if kind == "async" else telling_sync)

    @agent(version="1")
    async def asks(run: Run) -> str:
        try:
            await fails(Secret(NAME))
        except ToolFailed as error:
            return str(error)
        return "no error"

    async def main() -> tuple[str, str]:
        async with in_memory(asks) as app:
            await app.start(asks, id="r")
            await app.engine.drive("r", wait=False)
            return everything(app, "r"), (await app.handle("r").info()).status

    journal, _status = run(main())
    assert VALUE not in journal
    assert VALUE[:16] not in journal
    assert '"tool_call_failed"' in journal


def test_a_result_a_heartbeat_and_an_expense_are_recorded_without_the_value():
    @tool(effect="idempotent")
    async def tells(key: Secret, pin: Secret, call: Call) -> Any:
        value = key.reveal()
        call.heartbeat({"now": [value, {value: 1}]})
        call.spend(usd="0.01", model=f"model-{value}")
        return {value: [value, f"a {value} b", {"url": f"https://x/?k={value}"}], MARK: 1, "pin": int(pin.reveal()), "yes": True}

    @agent(version="1")
    async def asks(run: Run) -> Any:
        return await tells(Secret(NAME), Secret("pin"))

    async def main() -> tuple[Any, str]:
        async with in_memory(asks, secrets={NAME: VALUE, "pin": "493817"}.get) as app:
            return await app.run(asks, id="r"), everything(app, "r")

    result, journal = run(main())
    assert result == {
        MARK: 1,
        f"{MARK} 2": [MARK, f"a {MARK} b", {"url": f"https://x/?k={MARK}"}],
        "pin": "<secret pin>",
        "yes": True,
    }
    assert VALUE not in journal
    assert "493817" not in journal


def test_a_heartbeat_that_cannot_be_recorded_does_not_tell_the_value():
    @tool(effect="read")
    async def tells(key: Secret, call: Call) -> str:
        call.heartbeat({(key.reveal() * 10,): 1})
        return "never"

    @agent(version="1")
    async def asks(run: Run) -> str:
        try:
            return await tells(Secret(NAME))
        except ToolFailed as error:
            return error.message

    async def main() -> tuple[Any, str]:
        async with in_memory(asks) as app:
            return await app.run(asks, id="r"), everything(app, "r")

    message, journal = run(main())
    assert "keys must be strings" in message
    assert VALUE[:16] not in journal


def test_a_result_that_cannot_be_recorded_does_not_tell_the_value():
    @tool(effect="read")
    async def tells(key: Secret) -> Any:
        return {(key.reveal(),): 1}

    @agent(version="1")
    async def asks(run: Run) -> Any:
        try:
            return await tells(Secret(NAME))
        except ToolFailed as error:
            return type(error).__name__

    async def main() -> tuple[Any, str]:
        async with in_memory(asks) as app:
            return await app.run(asks, id="r"), everything(app, "r")

    result, journal = run(main())
    assert result == "ResultNotEncodable"
    assert VALUE[:16] not in journal


@pytest.mark.parametrize("place", [0, 1_048_570, 3_000_000])
def test_an_artifact_with_the_value_is_not_saved(place, tmp_path):
    @tool(effect="idempotent")
    async def saves(key: Secret, call: Call) -> str:
        for size in (0, 11, 1_048_576, 2_500_000):
            saved = await call.save(b"w" * size, content_type="text/plain")
            assert await saved.read() == b"w" * size
        try:
            await call.save(b"x" * place + key.reveal().encode() + b"y" * 100)
        except ArtifactNotSaved as error:
            return str(error)
        return "saved"

    @agent(version="1")
    async def asks(run: Run) -> str:
        return await saves(Secret(NAME))

    async def main() -> Any:
        async with app_on(url_of(tmp_path / "a.db"), asks) as app:
            return await app.run(asks, id="r")

    assert "the value of <secret stripe-key> is in the bytes" in run(main())
    assert all(VALUE[:6].encode() not in one.read_bytes() for one in tmp_path.glob("a.db*") if one.is_file())


def test_a_record_of_a_tool_is_logged_without_the_value():
    lines: list[str] = []
    plain: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    class Later(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            plain.append(f"{record.msg} {record.args} {record.exc_info} {record.exc_text} {record.stack_info}")

    log = logging.getLogger("tests.secrets")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler, later = Lines(), Later()
    handler.addFilter(RunFilter())
    handler.setFormatter(JsonFormatter())
    log.handlers = [handler, later]

    @tool(effect="read")
    async def logs(key: Secret) -> None:
        value = key.reveal()
        log.info("key %s and %r", value, {"k": value})
        log.info("all %(k)s", {"k": value}, extra={"headers": {"Authorization": f"Bearer {value}"}, "odd": object, value: 1})
        log.info(value, stack_info=True)
        try:
            raise ValueError(value)
        except ValueError:
            log.exception("failed with %s", value)
        log.info("does not fit", value)
        log.info("fields", extra={"run": value, "tenant": [value]})

    @agent(version="1")
    async def asks(run: Run) -> None:
        await logs(Secret(NAME))

    async def main() -> None:
        async with in_memory(asks) as app:
            await app.run(asks, id="r")

    try:
        run(main())
    finally:
        log.handlers = []
    assert len(lines) == len(plain) == 6
    assert VALUE not in "".join(lines).replace("\\/", "/")
    assert VALUE not in "".join(plain)
    assert json.loads(lines[0])["message"] == f"key {MARK} and {{'k': '{MARK}'}}"
    assert json.loads(lines[1])["headers"] == {"Authorization": f"Bearer {MARK}"}
    assert f"ValueError: {MARK}" in json.loads(lines[3])["exception"]


# -- the scrubber -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [VALUE, 'né "q" \\ \n<&>~', "0123456789abcdef0123456789abcdef", "1234"])
def test_a_value_is_found_in_every_form(value):
    import base64
    import html
    from urllib.parse import quote, quote_plus

    scrubber = Scrubber({NAME: value})
    raw = value.encode()
    forms = [
        *(value, repr(value), ascii(value), json.dumps(value), json.dumps(json.dumps(value)), json.dumps(value, ensure_ascii=False)),
        *(quote(value), quote(value, safe=""), quote_plus(value), re.sub("%..", lambda found: found[0].lower(), quote(value, safe=""))),
        *(raw.hex(), raw.hex().upper(), repr(raw), html.escape(value)),
        *(base64.b64encode(b"user:" + raw).decode() for _ in range(len(value) >= 8)),
        *(base64.urlsafe_b64encode(b"x" * lead + raw + b"yz").decode() for lead in range(3) if len(value) >= 8),
    ]
    for form in forms:
        text = f"before {form} after"
        assert MARK in scrubber.text(text), form
        assert value not in scrubber.text(text)


def test_a_message_that_is_cut_inside_the_value_keeps_nothing_of_it():
    scrub = Scrubber({NAME: VALUE}).text
    assert describe(ValueError("x" * 1_990 + VALUE), scrub=scrub).message == "x" * 1_990 + MARK[:9] + "…"


def test_a_text_that_is_cut_inside_a_value_keeps_nothing_of_it():
    value = "sk_live_" + "".join(f"{number:02x}" for number in range(40))
    scrubber = Scrubber({NAME: value, "short": "sk_live_"})
    assert scrubber.text(f"a {value[:60]}") == f"a {MARK}"
    assert scrubber.text(f"a {value[:16]}… b {value}{value} c {value[:15]}") == f"a {MARK}… b {MARK}{MARK} c <secret short>{value[8:15]}"


def test_each_line_of_a_long_key_counts():
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\nshort\nEFAASCBKcwggSjAgEAAoIBAQ\n-----END KEY-----"
    scrubber = Scrubber({NAME: key})
    assert scrubber.text(f"x {key.splitlines()[1]} y") == f"x {MARK} y"
    assert "MIIE" not in scrubber.text(key.replace("\n", "\\n"))
    assert "MIIE" not in scrubber.text(key.replace("\n", ""))


# -- hooks, models, plans -----------------------------------------------------------------------------------------------
def test_hooks_get_the_value_and_their_words_are_recorded_without_it():
    @tool(effect="once", timeout=1, settle=0)
    async def sends(key: Secret) -> str:
        raise TimeoutError

    @sends.reconcile
    async def _(key: Secret) -> Outcome:
        SEEN.append(key.reveal())
        return Outcome.happened(f"found with {key.reveal()}") if len(SEEN) > 1 else Outcome.in_progress()

    @sends.compensate
    async def _(key: Secret, result: str) -> str:
        SEEN.append(key.reveal())
        return f"undone with {key.reveal()} {result}"

    @agent(version="1")
    async def asks(run: Run) -> str:
        return await sends(Secret(NAME))

    async def main() -> tuple[Any, str]:
        async with in_memory(asks, settings=Settings(reconcile_margin_s=0.0, park_after_s=60.0)) as app:
            result = await app.run(asks, id="r")
            await app.undo("r", by="ann")
            return result, everything(app, "r", "r/undo")

    result, journal = run(main())
    assert result == f"found with {MARK}"
    assert SEEN == [VALUE] * 3
    assert VALUE not in journal
    assert f"undone with {MARK}" in journal


def test_a_hook_that_does_not_know_says_so_without_the_value():
    @tool(effect="once", timeout=1, settle=0)
    async def sends(key: Secret) -> str:
        raise TimeoutError

    @sends.reconcile
    async def _(key: Secret) -> Outcome:
        return Outcome.unknown(f"no idea about {key.reveal()}")

    @agent(version="1")
    async def asks(run: Run) -> str:
        return await sends(Secret(NAME))

    async def main() -> str:
        async with in_memory(asks, settings=Settings(reconcile_margin_s=0.0)) as app:
            await app.start(asks, id="r")
            await app.engine.drive("r", wait=False)
            return everything(app, "r")

    journal = run(main())
    assert f"no idea about {MARK}" in journal
    assert VALUE not in journal


@tool(effect="once")
async def pay(cents: int, key: Secret = Secret(NAME)) -> str:  # noqa: B008 (a Secret never changes)
    """Pay."""
    SEEN.append(key.reveal())
    return f"paid {cents} with {key.reveal()}"


def test_a_model_sees_no_secret_and_cannot_name_one():
    told: list[Any] = []

    def last(request: Any) -> str:
        told.append(request)
        return "done"

    uses = (
        ToolUse("u1", "pay", {"cents": 1}),
        ToolUse("u2", "pay", {"cents": 2, "key": {"$secret": "other"}}),
        ToolUse("u3", "pay", {"cents": {"$secret": NAME}}),
    )
    payer = ReAct("payer", model=Scripted([Answer("", uses, stop="tools"), last]), tools=[pay], instructions="pay", version="1")

    async def main() -> str:
        async with in_memory(payer) as app:
            await app.run(payer, "pay", id="r")
            return everything(app, "r")

    journal = run(main())
    assert SEEN == [VALUE]
    assert VALUE not in journal
    assert VALUE not in repr(told)
    assert "the argument key is unknown" in repr(told)
    assert "'key'" not in repr(told[0].tools)
    with pytest.raises(InvalidInput, match="parameter key of charge takes a Secret, which a model cannot fill in"):
        ReAct("careless", model=Scripted([]), tools=[charge], instructions="", version="1")


@tool(effect="read")
async def finds() -> dict[str, str]:
    return {"$secret": "other"}


def test_a_step_of_a_plan_has_the_default_and_data_names_no_secret():
    paying = Plan("paying", [Step("pay", pay, {"cents": 3}, approval=Approval(editable="cents"))], version="1")
    forging = Plan("forging", [Step("find", finds), Step("pay", pay, {"cents": 3, "key": ref("find")})], version="1")

    async def main() -> str:
        async with in_memory(paying, forging) as app:
            await app.start(paying, id="r")
            await app.engine.drive("r", wait=False)
            (row,) = app.store.approvals(ApprovalFilter(run_id="r"))
            await app.approve(row.approval, by="ann", edit={"cents": 4})
            await app.engine.drive("r", wait=False)
            await app.start(forging, id="f")
            await app.engine.drive("f", wait=False)
            assert (await app.handle("f").info()).status == "failed"
            return everything(app, "r", "f")

    journal = run(main())
    assert SEEN == [VALUE]
    assert f"paid 4 with {MARK}" in journal
    assert "it takes a Secret" in journal
    for wrong in ({"cents": 3, "key": {"$secret": "other"}}, {"cents": 3, "key": NAME}):
        with pytest.raises(InvalidInput, match="it takes a Secret"):
            Plan("wrong", [Step("pay", pay, wrong)], version="1")
    with pytest.raises(InvalidInput, match="'key' cannot be edited"):
        Plan("wrong", [Step("pay", pay, {"cents": 3}, approval=Approval(editable="key"))], version="1")


# -- isolated tools -----------------------------------------------------------------------------------------------------
@tool(effect="read", isolate=True)
def isolated(key: Secret, raises: bool, call: Call) -> dict[str, Any]:
    value = key.reveal()
    call.heartbeat({"key": value})
    around = [Path(f"/proc/{pid}/{file}").read_bytes() for pid in (os.getpid(), os.getppid()) for file in ("environ", "cmdline")]
    if raises:
        raise ValueError(f"bad key {value}")
    return {"has it": value.startswith("sk_live"), "leaks": any(value.encode() in one for one in around), "key": value}


@tool(effect="read", isolate=True)
def lying(key: Secret) -> None:
    """Writes its own answer into the pipe, past everything that removes secrets in its own process."""
    for fd in range(3, 20):
        try:
            text = json.dumps({"liar": key.reveal()}).encode()
            os.write(fd, b"R%d:%s\n" % (len(text), text))
        except OSError:
            continue
    os._exit(0)


@agent(version="1")
async def isolating(run: Run, raises: bool) -> Any:
    try:
        return await isolated(Secret(NAME), raises)
    except ToolFailed as error:
        return error.message


@agent(version="1")
async def lied_to(run: Run) -> Any:
    try:
        return await lying(Secret(NAME))
    except ToolFailed as error:
        return error.message


def test_an_isolated_tool_gets_the_value_through_the_pipe_alone(monkeypatch):
    monkeypatch.setenv("PERDURE_SECRET_STRIPE_KEY", VALUE)

    async def main() -> tuple[Any, Any, Any, str]:
        async with in_memory(isolating, lied_to, secrets=None) as app:
            found = await app.run(isolating, False, id="r"), await app.run(isolating, True, id="x"), await app.run(lied_to, id="l")
            return *found, everything(app, "r", "x", "l")

    result, error, lie, journal = run(main())
    assert result == {"has it": True, "leaks": False, "key": MARK}
    assert error == f"bad key {MARK}"
    assert VALUE not in journal
    assert VALUE not in repr(lie)


# -- failures that are recorded elsewhere -------------------------------------------------------------------------------
def test_an_attempt_that_fails_to_resolve_is_recorded_as_not_sent():
    answers = iter([OSError("no vault"), None])

    def shaky(name: str) -> str:
        found = next(answers, None)
        if isinstance(found, OSError):
            raise found
        return VALUE

    async def main() -> list[Any]:
        async with Perdure("sqlite://", [shop], settings=SETTINGS, clock=ManualClock(), secrets=shaky) as app:
            await app.start(shop, id="r")
            await app.engine.drive("r", wait=False)
            return [event.body for event in app.store.read("r")]

    bodies = run(main())
    (failed,) = [body for body in bodies if isinstance(body, ToolCallFailed)]
    assert (failed.failure.kind, failed.failure.message) == ("not_sent", "secret stripe-key: its resolver raised OSError")
    assert isinstance(bodies[0], RunCreated)


def test_the_ledger_of_a_crash_test_has_no_secret(tmp_path):
    call = Call.outside()
    call.scrubber = Scrubber({NAME: VALUE})
    assert _shown(pay, f"paid with {VALUE}", call) == f'"paid with {MARK}"'


def test_the_app_for_blocking_code_takes_a_resolver_too(tmp_path):
    with blocking.Perdure(url_of(tmp_path / "s.db"), [shop], settings=SETTINGS, secrets=known) as app:
        assert app.run(shop, 9, id="r") == "charged 9"
    assert SEEN == [VALUE]
