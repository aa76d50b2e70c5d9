"""Keys of journals that share an account at a provider.

Different effects have different keys; the same effect keeps its key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from perdure import Agent, Call, Perdure, Run, agent, tool
from perdure.config import load_settings
from perdure.core.events import ChildStarted, RunCreated
from perdure.core.identity import CallKeys
from perdure.core.state import fold
from perdure.errors import InvalidInput, StoreVersion
from perdure.settings import Settings


class Account:
    """A provider that drops a second request under the same key, as providers of payments do."""

    def __init__(self) -> None:
        self.done: dict[str, str] = {}

    def ask(self, key: str, what: str) -> str:
        return self.done.setdefault(key, what)


def _payer(account: Account, agent_name: str, tool_name: str) -> Agent[..., Any]:
    @tool(effect="keyed", name=tool_name)
    async def pay(call: Call) -> str:
        return account.ask(call.key, tool_name)

    @agent(name=agent_name, version="1")
    async def payer(run: Run) -> str:
        return await pay()

    return payer


def _run(journal: Path, payer: Agent[..., Any], settings: Settings | None = None, **options: Any) -> Any:
    async def main() -> Any:
        async with Perdure(f"sqlite:///{journal}", agents=[payer], settings=settings or Settings()) as app:
            return await app.run(payer, id="order-81", **options)

    return asyncio.run(main())


@pytest.mark.parametrize(("agent_name", "tool_name"), [("payout", "pay_out"), ("checkout", "pay_out"), ("payout", "charge")])
def test_another_effect_of_a_run_with_the_same_id_in_another_journal_is_not_dropped(
    tmp_path: Path, agent_name: str, tool_name: str
) -> None:
    account = Account()
    assert _run(tmp_path / "shop.db", _payer(account, "checkout", "charge")) == "charge"
    assert _run(tmp_path / "partners.db", _payer(account, agent_name, tool_name)) == tool_name
    assert len(account.done) == 2


def test_a_namespace_keeps_journals_with_the_same_agents_apart(tmp_path: Path) -> None:
    account = Account()
    for country in ("de", "fr"):
        _run(tmp_path / f"{country}.db", _payer(account, "checkout", "charge"), Settings(key_namespace=country))
    assert len(account.done) == 2


def test_the_same_call_has_the_same_key_in_a_journal_that_was_lost_and_made_anew(tmp_path: Path) -> None:
    """It saves the customer from a second charge."""
    account = Account()
    for attempt in ("lost", "anew"):
        _run(tmp_path / f"{attempt}.db", _payer(account, "checkout", "charge"), Settings(key_namespace="eu"))
    assert len(account.done) == 1


def test_a_run_keeps_the_namespace_that_it_was_begun_with_and_so_do_its_children(tmp_path: Path) -> None:
    account = Account()
    below = _payer(account, "below", "charge")

    @agent(version="1")
    async def above(run: Run) -> None:
        await below()

    async def main() -> None:
        url = f"sqlite:///{tmp_path / 'j.db'}"
        async with Perdure(url, agents=[above, below], settings=Settings(key_namespace="eu")) as app:
            await app.start(above, id="p")
        async with Perdure(url, agents=[above, below], settings=Settings(key_namespace="us")) as app:
            await app.handle("p").result()
            bodies = [event.body for event in app.store.read("p")]
            assert [body.key_namespace for body in bodies if isinstance(body, RunCreated | ChildStarted)] == ["eu", "eu"]
            child = fold(app.store.read("p/1"))
            assert child.calls[1].key == CallKeys("default", "p/1", "below", "eu", scheme=2).key(1, "charge")
            assert list(account.done) == [child.calls[1].key]

    asyncio.run(main())


def test_an_undo_has_the_namespace_of_the_run_that_it_undoes(tmp_path: Path) -> None:
    @tool(effect="keyed")
    async def pay(call: Call) -> str:
        return call.key

    @pay.compensate(effect="keyed")
    async def _(call: Call) -> str:
        return call.key

    @agent(version="1")
    async def payer(run: Run) -> str:
        return await pay()

    async def main() -> None:
        url = f"sqlite:///{tmp_path / 'j.db'}"
        async with Perdure(url, agents=[payer], settings=Settings(key_namespace="eu")) as app:
            await app.run(payer, id="r")
        async with Perdure(url, agents=[payer]) as app:
            await app.undo("r")
            undone = app.store.read("r/undo")[0].body
            assert isinstance(undone, RunCreated)
            assert (undone.key_namespace, undone.key_scheme) == ("eu", 2)

    asyncio.run(main())


def test_a_run_begun_under_the_first_scheme_keeps_its_keys() -> None:
    """A call in doubt is repeated under the key that its service has seen."""
    created = RunCreated("order-81", "checkout", "1", "acme", None)  # type: ignore[arg-type]
    assert CallKeys.of(created) == CallKeys("acme", "order-81")
    assert CallKeys.of(created) != CallKeys.of(structs.replace(created, key_scheme=2))


def test_a_scheme_of_a_newer_perdure_is_refused() -> None:
    created = RunCreated("order-81", "checkout", "1", "acme", None, key_scheme=3)  # type: ignore[arg-type]
    with pytest.raises(StoreVersion, match="order-81 makes its keys by scheme 3, and this perdure knows 2: upgrade perdure"):
        CallKeys.of(created)


def test_a_namespace_is_an_id(tmp_path: Path) -> None:
    assert load_settings({}, {"PERDURE_KEY_NAMESPACE": "eu-1"}, tmp_path).key_namespace == "eu-1"
    with pytest.raises(InvalidInput, match="PERDURE_KEY_NAMESPACE: the namespace 'e u' is not usable"):
        load_settings({}, {"PERDURE_KEY_NAMESPACE": "e u"}, tmp_path)
