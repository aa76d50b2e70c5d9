"""Redacted exports.

A value that a rule finds is nowhere in the file, in no encoding; and the copy says that it is redacted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.inspect_tools import url_of
from tests.unit.postgres_tools import empty
from tests.unit.test_specimens import NOW, take_in

from perdure import Approval, Budget, Perdure, ReAct, Run, Settings, agent, tool
from perdure.cli import cli
from perdure.core import codec
from perdure.core.events import Event, ModelCallInitiated, SignalReceived, ToolCallInitiated, ToolCallProposed
from perdure.core.redaction import Rules
from perdure.core.state import RunState
from perdure.errors import InvalidInput
from perdure.inspect.export import export_run, load, verdicts
from perdure.inspect.prompt import request_of_call
from perdure.inspect.redact import MARKER, Redactor, read_rules
from perdure.inspect.verify import verify_run
from perdure.inspect.view import loader, read_run
from perdure.models import Answer, Scripted, ToolUse
from perdure.store.api import ApprovalFilter, Store
from perdure.store.open import open_store
from perdure.tool.call import Call

SECRET = 'sk-"né/1+2\\q~Zz'  # it looks different escaped, percent-encoded and in base64
NUMBER = 4111111111111111


@tool(effect="read")
async def fetch(password: str, where: dict[str, Any]) -> dict[str, Any]:
    return {
        "echo": f"you said {password}!",
        "nested": [{"deep": {"copy": password}}],
        "as json": json.dumps({"password": password}),
        "as json in json": json.dumps({"inner": json.dumps({"password": password}, ensure_ascii=False)}),
        "header": "Basic " + base64.b64encode(f"ann:{password}".encode()).decode(),
        "link": f"https://example.org/?token={quote(password, safe='')}&x=1",
        "hex": password.encode().hex(),
        "number": NUMBER,
        "text of number": f"card {NUMBER} is charged",
        password: "as a key",
        "card": {"number": NUMBER},
    }


@tool(effect="read")
async def large(password: str) -> str:
    return "x" * 70_000 + password + "y" * 70_000


@tool(effect="idempotent")
async def fails(password: str, call: Call) -> None:
    call.heartbeat({"seen": password})
    raise PermissionError(f"{password} is not allowed")


@tool(effect="once", approval=Approval(by=("ann",), reason="it holds a token", editable="password"))
async def asked(password: str) -> str:
    return f"done with {password}"


@tool(effect="read")
async def keeps(password: str, call: Call) -> Any:
    return await call.save(f"artifact with {password}".encode(), content_type="text/plain")


@tool(effect="read")
async def look(password: str) -> str:
    """Look."""
    return "z" * 300 + password


MODEL = Scripted(
    [
        Answer(f"I look with {SECRET}", (ToolUse("u1", "look", {"password": SECRET}),), stop="tools"),
        lambda request: f"the answer is {SECRET}",
    ]
)
thinker = ReAct("thinker", model=MODEL, tools=[look], instructions=f"the token is {SECRET}", version="1")


@agent(version="1")
async def child(run: Run, password: str) -> str:
    return f"child {password}"


@agent(version="1", budget=Budget(calls=100))
async def leaky(run: Run, password: str, pin: str) -> str:
    run.status(f"status {password}")
    run.note(f"note {password}")
    run.decide({"choice": password}, among=[{"choice": password}, "no"], reason=f"because of {password}")
    await fetch(password, {"pin": pin})
    await large(password)
    await keeps(password)
    await asyncio.sleep(0.001)
    try:
        await fails(password)
    except Exception as error:
        run.note(f"failed: {error}")
    await child(password)
    await thinker(f"use {password}")
    await asked(password)
    got = await run.receive("chat")
    raise RuntimeError(f"at last {password} {got}")


def make(url: str) -> None:
    async def main() -> None:
        async with Perdure(url, [leaky, child, thinker], settings=Settings(inline_bytes=400)) as app:
            await app.start(leaky, password=SECRET, pin="99", id="leak", actor="user:17")
            await app.drive("leak")
            (row,) = app.store.approvals(ApprovalFilter(run_id="leak"))
            await app.approve(row.approval, by="ann", note=f"fine, {SECRET}", edit={"password": f"{SECRET}2"})
            await app.signal("leak", "chat", {"token": f"by signal {SECRET}"}, key="key-1")
            await app.pause("leak", by="ann", reason=f"why: {SECRET}")
            await app.unpause("leak", by="ann", note=f"go: {SECRET}")
            await app.drive("leak")

    asyncio.run(main())


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    is_file = request.param == "sqlite"
    url = url_of(tmp_path_factory.mktemp("leak") / "leak.db") if is_file else empty(request.getfixturevalue("postgres"))
    make(url)
    store = open_store(url)
    assert {row.run_id for row in store.list()} >= {"leak"}
    yield store
    store.close()


def written(store: Store, *rules: str, run_id: str = "leak") -> bytes:
    lines: list[bytes] = []
    export_run(store, run_id, lines.append, read_rules(rules) if rules else None)
    return b"".join(lines)


def traces(raw: bytes, secret: str) -> list[str]:
    """In which encodings the secret is in the file: in its raw bytes, and in everything that can be decoded from them."""
    layers = [raw]
    for line in raw.splitlines():
        record = json.loads(line)
        layers += [base64.b64decode(record["base64"])] if "base64" in record else []
        layers += [record["data"].encode()] if "data" in record else []
    found = []
    plain = secret.encode()
    once = json.dumps(secret)[1:-1].encode()
    forms = {
        "plain": plain,
        "escaped": once,
        "escaped twice": json.dumps(once.decode())[1:-1].encode(),
        "escaped, not ASCII": json.dumps(secret, ensure_ascii=False)[1:-1].encode(),
        "percent": quote(secret, safe="").encode(),
        "hex": plain.hex().encode(),
        "base64": base64.b64encode(plain)[:-2],
        "base64 of user and secret": base64.b64encode(b"ann:" + plain)[6:-4],
    }
    for name, form in forms.items():
        found += [name for layer in layers if form in layer]
    return found


def test_without_redaction_the_secret_is_in_the_file_in_all_these_forms(source: Store) -> None:
    """The canary lives: the searches of the next tests find what there is to be found."""
    assert set(traces(written(source), SECRET)) == {
        *("plain", "escaped twice", "escaped, not ASCII", "percent", "hex", "base64 of user and secret"),
    }
    assert str(NUMBER).encode() in written(source)


@pytest.mark.parametrize("rules", [("key:Password",), (f"text:{re.escape(SECRET)}", "key:password"), ("path:password",)])
def test_a_value_that_a_rule_has_found_is_nowhere_in_the_file(source: Store, rules: tuple[str, ...]) -> None:
    raw = written(source, *rules)
    assert traces(raw, SECRET) == []
    assert b"[redacted]" in raw


def test_a_number_is_redacted_as_a_number_and_in_texts(source: Store) -> None:
    raw = written(source, "path:card.number")
    assert str(NUMBER).encode() not in raw
    assert str(NUMBER).encode() not in written(source, r"text:\b\d{16}\b", "key:password")


def test_no_digest_of_a_redacted_value_is_left(source: Store) -> None:
    """The digest of a short secret would give it away: it can be guessed."""
    before = {
        codec.digest(json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode())
        for value in (
            {"password": SECRET},
            {"password": SECRET, "where": {"pin": "99"}},
            {"password": SECRET, "pin": "99"},
            {"password": f"{SECRET}2"},
        )
    }
    assert any(digest.encode() in written(source) for digest in before), "approvals record digests of arguments"
    raw = written(source, "key:password")
    assert not [digest for digest in before if digest.encode() in raw]


def test_a_redacted_copy_is_sound_says_what_it_is_and_can_be_imported(source: Store, tmp_path: Path) -> None:
    file = tmp_path / "copy.jsonl"
    file.write_bytes(written(source, "key:password"))
    export = load(file)
    row = source.get("leak")
    assert row is not None
    assert export.header.format == 2
    assert export.header.redacted
    assert export.header.original_head == row.head.hex()
    assert all(verdict.problem is None and verdict.original_head is not None for verdict in verdicts(file))
    store = open_store(f"sqlite:///{tmp_path}/here.db")
    assert take_in(store, file)
    assert not take_in(store, file)
    for here in store.list():
        verdict = verify_run(store, here)
        original = source.get(here.run_id)
        assert original is not None
        assert (verdict.problem, verdict.original_head) == (None, original.head.hex()), here.run_id
        assert verdict.head != verdict.original_head
    seen = read_run(store, "leak")
    assert seen.state.status == "failed"
    asked = next(event.body for event in seen.events if isinstance(event.body, ToolCallProposed))
    assert asked.digest == asked.args.digest, "digests are those of the redacted values"
    url = f"sqlite:///{tmp_path}/here.db"
    for args, words in (
        (
            ["verify", "leak"],
            rf"^run leak: redacted copy: content cannot be verified, original head {row.head.hex()}; all \d+ events are as",
        ),
        (["verify"], r"all as they were written; \d runs are redacted copies, whose content cannot be verified"),
        (["verify", "--export", str(file)], "redacted copy: content cannot be verified"),
        (["show", "leak"], rf"redacted \d+ values of the file; original head {row.head.hex()}"),
        (["why", "leak"], "a redacted specimen"),
    ):
        answer = CliRunner().invoke(cli, [*args, *([] if "--export" in args else ["--url", url])])
        assert (answer.exit_code, bool(re.search(words, answer.stdout))) == (0, True), answer.output
    store.close()


def test_an_export_of_a_redacted_specimen_stays_a_redacted_copy(source: Store, tmp_path: Path) -> None:
    file = tmp_path / "copy.jsonl"
    file.write_bytes(written(source, "key:password"))
    store = open_store("sqlite://")
    take_in(store, file)
    for rules in ((), ("key:choice",)):
        again = tmp_path / f"again{len(rules)}.jsonl"
        again.write_bytes(written(store, *rules))
        header = load(again).header
        assert (header.format, header.original_head) == (2, load(file).header.original_head)
    store.close()


def test_a_damaged_redacted_copy_is_damaged(source: Store, tmp_path: Path) -> None:
    file = tmp_path / "copy.jsonl"
    file.write_bytes(written(source, "key:password").replace(b"note [redacted]", b"note [rewritten]"))
    assert any("not what was written" in str(verdict.problem) for verdict in _until_damage(file))


def _until_damage(file: Path) -> Iterator[Any]:
    from perdure.errors import StoreCorrupt

    try:
        yield from verdicts(file)
    except StoreCorrupt:
        return


def test_requests_to_models_are_rebuilt_from_the_redacted_parts(source: Store, tmp_path: Path) -> None:
    file = tmp_path / "copy.jsonl"
    file.write_bytes(written(source, "key:password"))
    store = open_store("sqlite://")
    take_in(store, file)
    (name,) = [row.run_id for row in store.list() if row.agent == "thinker"]
    reading = read_run(store, name)
    asked = [event.call for event in reading.events if isinstance(event.body, ModelCallInitiated)]
    assert len(asked) == 2
    for call in asked:
        whole = request_of_call(reading, int(call or 0), loader(store))
        assert traces(json.dumps({"data": whole.decode()}).encode(), SECRET) == []
        assert MARKER in whole.decode()
    store.close()


def test_artifacts_are_left_out_of_a_redacted_copy(source: Store, tmp_path: Path) -> None:
    lines: list[bytes] = []
    done = export_run(source, "leak", lines.append, read_rules(["key:password"]))
    assert done.left_out == 1
    assert not any(line.startswith((b'{"kind":"artifact"', b'{"kind":"bytes"')) for line in lines)
    assert any(line.startswith(b'{"kind":"artifact"') for line in written(source).splitlines())


def test_a_short_secret_is_replaced_where_a_rule_has_found_it_and_is_told(source: Store) -> None:
    lines: list[bytes] = []
    done = export_run(source, "leak", lines.append, read_rules(["key:pin"]))
    assert done.short == 1
    assert b'\\"pin\\":\\"99\\"' not in b"".join(lines)


def _told(value: Any, *rules: str) -> tuple[Any, Redactor]:
    """The value as a redacted copy has it, and the redactor."""
    payload = codec.pack(codec.encode(value), codec.MAX_BYTES)[0]
    redactor = Redactor(read_rules(rules), lambda one: one.inline or b"")
    event = Event(1, "e", 0, 0, None, None, SignalReceived("told", payload, by="ann"))
    redactor.collect(event.body)
    body = redactor.redact(event, RunState(), [])
    assert isinstance(body, SignalReceived)
    return codec.decode(body.payload.inline or b""), redactor


def test_a_short_number_is_counted_and_is_replaced_under_its_key_in_json_that_is_a_text() -> None:
    inner = json.dumps({"cents": 4900, "other": 4900})
    told = {"cents": 4900, "text": f"the tool said {inner}", "twice": json.dumps({"inner": inner}), "plain": "4900 cents", "n": 4900}
    value, redactor = _told(told, "key:CENTS")
    assert value == {
        "cents": MARKER,
        "text": f'the tool said {{"cents": "{MARKER}", "other": 4900}}',
        "twice": json.dumps({"inner": json.dumps({"cents": MARKER, "other": 4900})}),
        "plain": "4900 cents",  # a short number is not searched for elsewhere
        "n": 4900,
    }
    assert (redactor.count, redactor.short) == (3, 1)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('{"pin":"99","pins":"99"}', f'{{"pin":"{MARKER}","pins":"99"}}'),
        ('{"pin" : -1.5e3}', f'{{"pin" : "{MARKER}"}}'),
        ('{"pin":true, "a":"pin"}', f'{{"pin":"{MARKER}", "a":"pin"}}'),
        (f'{{"pin":"{MARKER}"}}', f'{{"pin":"{MARKER}"}}'),
        ('"pin": null', '"pin": null'),
        ("\\" * 200_000, "\\" * 200_000),  # in linear time
    ],
)
def test_keys_in_json_in_a_text_are_found_whatever_their_value(text: str, left: str) -> None:
    assert _told([text], "key:pin")[0] == [left]


def test_the_command_says_how_many_values_are_short(tmp_path: Path) -> None:
    url = url_of(tmp_path / "j.db")

    @agent(version="1")
    async def charges(run: Run, cents: int, card: str) -> str:
        return "ok"

    async def drive() -> None:
        async with Perdure(url, agents=[charges]) as app:
            await app.run(charges, 4900, "abc", id="r")

    asyncio.run(drive())
    words = ["export", "r", "--redact", "key:cents", "--redact", "key:card", "-o", str(tmp_path / "r.jsonl"), "--url", url]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "2 redacted values are short (fewer than 4 characters, or a number of fewer than 6 digits)" in result.output


@pytest.mark.parametrize("rule", ["text:leak", "text:fetch", "text:thinker"])
def test_a_rule_that_matches_what_the_run_needs_is_refused_and_nothing_is_written(source: Store, rule: str) -> None:
    lines: list[bytes] = []
    with pytest.raises(InvalidInput, match=r"cannot be redacted.*Nothing was written"):
        export_run(source, "leak", lines.append, read_rules([rule]))
    assert lines == []


def test_a_rule_for_hexadecimal_tokens_does_not_trip_over_hashes(source: Store, tmp_path: Path) -> None:
    file = tmp_path / "copy.jsonl"
    file.write_bytes(written(source, "text:[0-9a-f]{24,}"))
    assert all(verdict.problem is None for verdict in verdicts(file))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("key:", "is no rule"),
        ("text:(", "not a regular expression"),
        ("text:a*", "matches the empty text"),
        ("nothing-there.txt", "No such file.*give a rule"),
    ],
)
def test_a_bad_rule_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=words):
        read_rules([rule])


def test_rules_come_from_a_file_with_comments(tmp_path: Path) -> None:
    file = tmp_path / "rules.txt"
    file.write_text("# what leaves the house\n\nkey:password\npath:card.*\n  text:sk-[a-z]+  \n")
    assert read_rules([str(file), "key:pin"]) == Rules(frozenset(("password", "pin")), (("card", "*"),), (re.compile("sk-[a-z]+"),))
    file.write_text("password\n")
    with pytest.raises(InvalidInput, match=r"rules.txt, line 1 is no rule"):
        read_rules([str(file)])
    file.write_text("# nothing\n")
    with pytest.raises(InvalidInput, match="there is no rule in it"):
        read_rules([str(file)])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(secret=st.text(min_size=4, max_size=20).filter(lambda text: text not in MARKER), around=st.text(), other=JSON)
@settings(max_examples=300, deadline=None)
def test_any_secret_is_found_in_any_text_around_it(secret: str, around: str, other: Any) -> None:
    from perdure.core.events import Event
    from perdure.core.state import RunState

    def load(payload: codec.Payload) -> bytes:
        assert payload.inline is not None
        return payload.inline

    args = codec.pack(codec.encode({"password": secret, "again": [f"{around}{secret}{around}", other]}), 1 << 30)[0]
    body = ToolCallInitiated("t", "read", args=args)
    redactor = Redactor(read_rules(["key:password"]), load)
    redactor.collect(body)
    after = redactor.redact(Event(1, "0" * 32, 0, 0, 1, None, body), RunState(), [])
    assert isinstance(after, ToolCallInitiated)
    assert after.args is not None
    value = codec.decode(load(after.args))
    assert value["password"] == MARKER
    assert not [text for text in _strings(value) if secret in text.replace(MARKER, "\0")]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def test_the_command_line_says_what_was_redacted(source: Store, tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli, ["export", "leak", "-o", str(tmp_path / "f"), "--redact", "key:password", "--url", source.url])
    assert answer.exit_code == 0, answer.output
    assert "(a redacted copy)" in answer.stdout
    assert re.search(r"\d+ values were redacted; look into the file", answer.stderr)
    assert "1 artifact was left out" in answer.stderr
    none = CliRunner().invoke(cli, ["export", "leak", "-o", str(tmp_path / "g"), "--redact", "key:none", "--url", source.url])
    assert "nothing was redacted: no rule matches" in none.stderr
    assert NOW
