"""A secret that tools tell in odd places is in no output of any verb, and in no byte of the database (G15)."""

from __future__ import annotations

import base64
import io
import logging
import os
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit import leaky_tools
from tests.unit.drive_tools import run
from tests.unit.leaky_tools import FORMS, NAME, PLACES, TOOLS, leaky, leaky_child
from tests.unit.postgres_tools import empty

from perdure import Perdure, Settings
from perdure.cli import cli
from perdure.logs import JsonFormatter, RunFilter
from perdure.store.api import ApprovalFilter

TARGET = f"{leaky_tools.__file__}:leaky"
VARIABLE = "PERDURE_SECRET_ODD_KEY"
# Words of perdure and of the tools would be found anywhere, so a value has a part that is nowhere else.
values = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=0, max_size=30).map(lambda text: f"{text}qZ7{text}#Wx")
steps = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.sampled_from(sorted(PLACES)), st.sampled_from(sorted(FORMS))).map(list),
    min_size=1,
    max_size=4,
)


def verbs(folder: Path) -> list[list[str]]:
    both = [["show", "r"], ["why", "r"], ["events", "r"], ["trace", "r"], ["costs"], ["approvals"], ["list"], ["errors"], ["audit"]]
    return [
        *both,
        *([*one, "--json"] for one in both if one[0] != "audit"),
        *(["show", f"r/{number}"] for number in range(1, 8)),
        ["list", "--where", "error:last"],
        ["inspect", "r", TARGET],
        ["replay", "r", TARGET],
        ["diff", "r", "r", "--html", str(folder / "diff.html")],
        ["fork", "r", TARGET, "--html", str(folder / "fork.html")],
        ["export", "r", "--output", str(folder / "r.jsonl")],
        ["verify"],
        ["doctor"],
    ]


def traces(found: str | bytes, value: str) -> list[str]:
    """The forms in which the value is in this text."""
    raw = value.encode("utf-8", "surrogatepass")
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
    forms = {
        "plain": value,
        "escaped": repr(value)[1:-1],
        "percent": quote(value, safe=""),
        "hex": raw.hex(),
        "base64": base64.b64encode(b"ann:" + raw).decode()[6 : (4 + len(raw)) * 8 // 6],
    }
    return [name for name, form in forms.items() if form in text]


def everything_told(url: str, value: str, steps: list[list[str]], form: str, folder: Path) -> dict[str, str | bytes]:
    """All that can be read about a run whose tools tell the value: files, logs, and the output of each verb."""
    told: dict[str, str | bytes] = {}
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RunFilter())
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger()
    logger.addHandler(handler)

    async def main() -> None:
        async with Perdure(url, [leaky, leaky_child], settings=Settings(inline_bytes=400, progress_s=0, reconcile_margin_s=0)) as app:
            await app.start(leaky, steps, form, id="r")
            await app.drive("r", wait=False)
            told["info"] = repr(await app.handle("r").info())
            await app.signal("r", "go", by="ann")
            await app.drive("r", wait=False)
            (row,) = app.store.approvals(ApprovalFilter(run_id="r"))
            told["approval"] = repr(row)
            await app.approve(row.approval, by="ann")
            await app.drive("r", wait=False)
            assert (await app.handle("r").info()).status == "failed"
            for file in folder.rglob("*"):
                if file.is_file():
                    told[f"file {file.name}"] = file.read_bytes()  # also the write-ahead log, which a close removes

    try:
        run(main())
        for verb in verbs(folder):
            answer = CliRunner().invoke(cli, [*verb, "--url", url])
            told[" ".join(verb[:2])] = answer.output
    finally:
        logger.removeHandler(handler)
    told["log"] = stream.getvalue()
    told |= {f"file {file.name} at the end": file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return told


def check(value: str, steps: list[list[str]], form: str, url: str | None = None) -> dict[str, str | bytes]:
    os.environ[VARIABLE] = value
    try:
        with tempfile.TemporaryDirectory() as name:
            told = everything_told(url or f"sqlite:///{name}/r.db", value, steps, form, Path(name))
    finally:
        del os.environ[VARIABLE]
    assert {where: found for where, text in told.items() if (found := traces(text, value))} == {}
    return told


ODD = 'sk_"né/1+2\\q~Zz\nqZ7#Wx'
ALL = [
    [kind, place, form]
    for kind, form in (("async", "plain"), ("sync", "json in json"), ("transaction", "base64"))
    for place in sorted(PLACES)
]


FEW = [["async", "group", "json in json"], ["sync", "result", "base64"], ["transaction", "heartbeat", "plain"], ["async", "log", "url"]]


def tells(told: dict[str, str | bytes]) -> None:
    """The outputs do tell about the run, so that these tests can fail."""
    for where in ("show r", "why r", "events r", "log", "audit", "approval"):
        assert NAME in str(told[where]), (where, told[where])
    for where in ("trace r", "inspect r", "replay r", "diff r", "costs", "list"):
        assert "leaky" in str(told[where]) or "run r" in str(told[where]), (where, told[where])


def test_a_secret_in_odd_places_is_in_no_output() -> None:
    tells(check(ODD, FEW, "plain"))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_secret_in_all_places_is_in_no_output(kind: str, request: pytest.FixtureRequest) -> None:
    tells(check(ODD, ALL, "large", None if kind == "sqlite" else empty(request.getfixturevalue("postgres"))))


@pytest.mark.full
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(values, steps, st.sampled_from(sorted(FORMS)))
def test_any_secret_in_any_place_is_in_no_output(value: str, steps: list[list[str]], form: str) -> None:
    check(value, steps, form)
