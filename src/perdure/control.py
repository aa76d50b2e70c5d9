"""What people and programs send to runs: votes, signals, cancel, pause, answers about a doubt, more budget.

Each request is checked here, converted to an event body, and passed to the engine as one write. When the method
returns, the request is durable. Each request counts once. Only `unpause` with more budget makes several writes: one
for the budget, and one for each run that continues.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from perdure import shell
from perdure.core import codec, identity
from perdure.core.approval import A_NAME, Vote, same_name
from perdure.core.budget import Amounts, exceeded, too_much
from perdure.core.codec import shown
from perdure.core.decide import Patience, quiet_at
from perdure.core.events import (
    AnyBody,
    BudgetExceeded,
    BudgetRaised,
    CancelRequested,
    Failure,
    Limits,
    RunCancelled,
    RunPaused,
    RunUnpaused,
    SignalReceived,
    ToolCallResolved,
)
from perdure.core.failures import clean
from perdure.core.state import CallState, RunState, fold, unsettled
from perdure.engine.api import AskReading, Engine, no_such_run
from perdure.engine.clock import Clock
from perdure.errors import Conflict, InvalidInput, NotFound, StoreCorrupt
from perdure.settings import Settings
from perdure.store.api import ApprovalRow, Ledger, RunRow

MAX_SIGNAL_BYTES = 1024 * 1024
NOTHING: Any = object()
_LIMITS = {"usd": "usd_micros", "tokens": "tokens", "calls": "calls", "seconds": "busy_us"}


class Control:
    """Sends post and votes to runs. If `tenant` is given, runs of other tenants count as not found (G16).

    `batch`: the id of the bulk operation to which all of this belongs; it is recorded with each event.
    """

    def __init__(self, engine: Engine, ask: AskReading, clock: Clock, settings: Settings, batch: str = "") -> None:
        self._engine = engine
        self._ask = ask
        self._clock = clock
        self._roles = settings.roles
        self._lease_us = round(settings.lease_s * 1e6)
        self._patience = Patience.of(settings)
        self._batch = batch

    # -- approvals ----------------------------------------------------------------------------------------------------
    async def vote(self, approval: str, vote: Vote, *, tenant: str | None = None) -> ApprovalRow:
        """Approve or reject. The vote counts once. The store judges it inside one transaction."""
        approval = plain_text(approval, "an approval's id")
        check_tenant(tenant)
        who = known_name(vote.by)
        roles = (*map(_role, vote.roles), *(_role(role) for role, members in self._roles.items() if who in map(same_name, members)))
        known = Vote(who, vote.granted, roles, words(vote.note, "note"), words(vote.source, "source"), vote.digest, vote.edit)
        if vote.digest is not None:
            plain_text(vote.digest, "the digest of what was seen")

        return await self._engine.vote(approval, known, tenant=tenant)

    # -- steering -----------------------------------------------------------------------------------------------------
    async def signal(self, run_id: str, topic: str, payload: Any, *, by: str, key: str | None, tenant: str | None) -> None:
        topic = identity.check_id(topic, "the topic")
        if key is not None:
            key = identity.check_id(key, "the signal's key")
        encoded = codec.encode(payload)
        if len(encoded) > MAX_SIGNAL_BYTES:
            raise InvalidInput(f"a signal of {len(encoded):,} bytes; the limit is {MAX_SIGNAL_BYTES:,}: send a reference to it instead")
        body = SignalReceived(topic, codec.pack(encoded, MAX_SIGNAL_BYTES)[0], known_name(by), key)
        await self._tell(run_id, body, tenant)

    async def cancel(self, run_id: str, *, by: str, reason: str | None, tenant: str | None) -> None:
        body = CancelRequested(by=known_name(by), reason=words(reason, "reason"), batch=self._batch)
        await self._tell(run_id, body, tenant)

    async def end(self, run_id: str, *, by: str, reason: str | None, tenant: str | None) -> None:
        """End a run without its agent, for example if the agent's code is lost or can no longer replay the run."""
        await self._row(run_id, tenant)
        try:
            state: RunState | None = await self._state(run_id)
        except StoreCorrupt:
            state = None  # a run with a damaged journal can be ended too
        # The cost of calls that may have happened is charged: after the end, no answer about these calls can arrive.
        open_calls = () if state is None else state.open.values()
        why, who = words(reason, "reason"), known_name(by)
        body = RunCancelled(reason=why, forced_by=who, unsettled=unsettled(open_calls), batch=self._batch)
        await self._engine.end(run_id, body, seen=None if state is None else state.seq)

    async def pause(self, run_id: str, *, by: str, reason: str | None, tenant: str | None) -> None:
        await self._tell(run_id, RunPaused(by=known_name(by), reason=words(reason, "reason"), batch=self._batch), tenant)

    async def unpause(self, run_id: str, *, by: str, note: str | None, add: Limits | None, tenant: str | None) -> list[str]:
        """Continue a run that is paused or needs attention. With `add`, its budget is raised first.

        Returns the ids of the runs that continue.
        """
        row = await self._row(run_id, tenant)
        who, note = known_name(by), words(note, "note")
        if add is not None:
            return await self._raise_budget(row, add, who, note)
        await self._engine.post(row.run_id, RunUnpaused(by=who, note=note, batch=self._batch))
        return [run_id]

    async def resolve(
        self,
        run_id: str,
        call: int,
        *,
        happened: Any,
        did_not_happen: bool,
        fail: str | None,
        final: bool,
        by: str,
        note: str | None,
        attempt: int | None = None,
        tenant: str | None = None,
    ) -> None:
        """Resolve a call that is in doubt. With `attempt`: only if this attempt is the one in doubt."""
        row = await self._row(run_id, tenant)
        _check_answer(call, did_not_happen, fail, final)
        if (happened is not NOTHING) + did_not_happen + (fail is not None) != 1:
            raise InvalidInput("say exactly one of: happened=RESULT, did_not_happen=True, fail=TEXT")
        state = await self._state(run_id)
        found = state.calls.get(call)
        if found is None:
            raise NotFound(f"run {run_id} has no call {call}; its calls are {_numbers(state)}")
        if found.phase != "in_doubt" and not (found.phase == "started" and found.effect in ("once", "keyed")):
            stands = f"was settled by {found.resolved_by}" if found.resolved_by else f"is {found.phase.replace('_', ' ')}"
            raise Conflict(f"call {call} ({found.tool}) of run {run_id} {stands}; only a call in doubt can be resolved")
        if attempt is not None and attempt != found.attempt:
            # The attempt that the person saw was settled meanwhile, and a later attempt is in doubt now: nothing is known about it.
            raise Conflict(f"call {call} ({found.tool}) of run {run_id}: attempt {found.attempt} is in doubt, and not attempt {attempt}")
        if found.phase == "started" and (await self._row(run_id, None)).holder in await self._alive():
            raise Conflict(f"call {call} ({found.tool}) of run {run_id} is being performed by a live worker; wait for its result")
        if did_not_happen and not final:
            self._check_quiet(run_id, found)
        who, note = known_name(by), words(note, "note")
        if happened is not NOTHING:
            payload = codec.pack(codec.encode(happened), codec.MAX_BYTES)[0]
            body = ToolCallResolved("happened", by=who, attempt=found.attempt, result=payload, note=note)
        elif did_not_happen:
            body = ToolCallResolved("did_not_happen", by=who, attempt=found.attempt, note=note, final=final)
        else:
            failure = Failure(kind="fatal", type="Resolved", message=clean(fail or "", 2000))
            body = ToolCallResolved("failed", by=who, attempt=found.attempt, failure=failure, note=note)
        body = structs.replace(body, usage=found.cost_if(body.outcome), batch=self._batch)
        await self._engine.post(row.run_id, body, call=call, seen=state.seq, tenant=tenant)

    # -- internal -----------------------------------------------------------------------------------------------------
    async def _tell(self, run_id: str, body: AnyBody, tenant: str | None) -> None:
        check_tenant(tenant)
        await self._engine.post(plain_text(run_id, "a run's id"), body, tenant=tenant)

    def _check_quiet(self, run_id: str, call: CallState) -> None:
        """Raise Conflict while the request of a lost attempt may still arrive.

        If a person looks at the service during that time, "not found" proves nothing (T31).
        """
        until = quiet_at(call, self._patience)
        if until is not None and until <= self._clock.now():
            return
        hint = "on the command line: --final"
        if until is not None:
            then = datetime.fromtimestamp(until // 1_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            why = f"its request may still arrive until {then}: look again at the service after that"
        elif call.quiet_since:
            why = "its attempt may still be running, and its tool has no timeout= that would end it: make sure that its process has ended"
        else:
            why = "no worker has taken the run over since the call began, so its end is not known"
            hint = f"{shell.command('resume', run_id)}, then look again; or --final, if its request cannot arrive any more"
        raise Conflict(
            f"call {call.number} ({call.tool}) of run {run_id}: {why}. If you know that its request cannot arrive any more (the service has "
            "cancelled its key, for example), say so: final=True",
            hint=hint,
        )

    async def _raise_budget(self, row: RunRow, add: Limits, by: str, note: str | None) -> list[str]:
        reading = self._engine.reading
        ledgers = await self._ask(lambda: reading.ledgers(row.run_id))
        if not ledgers:
            raise Conflict(f"run {row.run_id} has no budget, so nothing can be added to it")
        over = (await self._state(row.run_id)).over
        owner = over.budget_of if over is not None else ledgers[0].run_id
        ledger = next(ledger for ledger in ledgers if ledger.run_id == owner)
        check_helps(row.run_id, ledger, add, over, shell.command("unpause", row.run_id))
        await self._engine.post(owner, BudgetRaised(add, by, note, self._batch))
        go_on = await self.unpause_under(owner, by=by, note=note)
        if row.status == "paused":
            await self._engine.post(row.run_id, RunUnpaused(by=by, note=note, batch=self._batch))
            go_on.append(row.run_id)
        return go_on

    async def unpause_under(self, owner: str, *, by: str, note: str | None) -> list[str]:
        """Continue every run that the budget of `owner` has stopped. Returns their ids."""
        reading = self._engine.reading
        stopped = await self._ask(lambda: reading.over_budget(owner))
        for run_id in stopped:
            await self._engine.post(run_id, RunUnpaused(by=by, note=note, batch=self._batch))
        return stopped

    async def _row(self, run_id: str, tenant: str | None) -> RunRow:
        run_id = plain_text(run_id, "a run's id")
        check_tenant(tenant)
        reading = self._engine.reading
        row = await self._ask(lambda: reading.get(run_id))
        if row is None or (tenant is not None and row.tenant != tenant):
            raise no_such_run(run_id)
        return row

    async def _state(self, run_id: str) -> RunState:
        await self._row(run_id, None)
        reading = self._engine.reading
        return await self._ask(lambda: fold(reading.read(run_id)))

    async def _alive(self) -> set[str | None]:
        reading, now = self._engine.reading, self._clock.now()
        return {worker.worker for worker in await self._ask(lambda: reading.workers(now, self._lease_us)) if worker.alive}


def _numbers(state: RunState) -> str:
    return f"1 to {state.numbers}" if state.numbers else "none so far"


def check_helps(run_id: str, ledger: Ledger, add: Limits, over: BudgetExceeded | None, command: str) -> None:
    """Raise Conflict if `add` adds to something that has no limit, or if the run would stop again at once.

    `command` is the beginning of the command that adds to the budget, for the hint of the error.
    """
    limits = {what: getattr(ledger.limits, name) for what, name in _LIMITS.items()}
    added = {what: getattr(add, name) for what, name in _LIMITS.items()}
    without = [what for what, more in added.items() if more is not None and limits[what] is None]
    if without:
        limited = ", ".join(what for what, limit in limits.items() if limit is not None)
        used_up = f"; it has used up its {over.what}" if over is not None else ""
        raise Conflict(
            f"the budget of run {ledger.run_id} limits {limited} and not {without[0]}, so no {without[0]} can be added{used_up}",
            hint=f"add to what is used up: {_adding(command, over.what)} N" if over is not None else "",
        )
    beyond = too_much(ledger.limits, add)
    if beyond is not None:
        raise Conflict(f"the budget of run {ledger.run_id} would allow more {beyond} than any budget may allow; add less")
    if over is None:
        return
    sums: dict[str, Any] = {_LIMITS[what]: None if limit is None else limit + (added[what] or 0) for what, limit in limits.items()}
    raised = Limits(**sums)
    still = exceeded(ledger.run_id, raised, ledger.spent, Amounts(**{_LIMITS[over.what]: over.wanted}))
    if still is None:
        return
    least = max(still.used + still.wanted - still.limit, still.used - still.limit + 1) + (added[still.what] or 0)
    number = f"{least / 1e6:.6f}".rstrip("0").rstrip(".") if still.what in ("usd", "seconds") else str(least)
    raise Conflict(
        f"run {run_id} would stop again at once: the {still.what} of the budget of run {ledger.run_id} are used up; it takes at least {number}",
        hint=f"add that: {_adding(command, still.what)} {number}",
    )


def _adding(command: str, what: str) -> str:
    """The beginning of the command that adds to this limit. `what` may come from a recorded event, so it is quoted."""
    return f"{command} {shell.quote(f'--add-{what}')}"


def plain_text(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"{what} is text, and {shown(text)} is not")
    return str.__str__(text)  # a plain str: a subclass may override __str__


def check_tenant(tenant: Any) -> None:
    if tenant is not None:
        plain_text(tenant, "a tenant")


def _check_answer(call: Any, did_not_happen: Any, fail: Any, final: Any) -> None:
    if not isinstance(call, int) or isinstance(call, bool):
        raise InvalidInput(f"{shown(call)} is not the number of a call", hint="`perdure why` shows the calls that are in doubt")
    if not isinstance(did_not_happen, bool):
        raise InvalidInput(f"did_not_happen={shown(did_not_happen)}: True or False")
    if not isinstance(final, bool) or (final and not did_not_happen):
        raise InvalidInput(f"final={shown(final)}: True or False, and True only with did_not_happen=True")
    if fail is not None:
        plain_text(fail, "fail=, the error of the call,")


def known_name(by: Any) -> str:
    """The name in the form that is compared and recorded, so that two spellings of a name count as one person."""
    # Python decodes invalid UTF-8 on a command line to lone surrogates. They are escaped, so that the name can be
    # stored and shown.
    name = same_name(by.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(by, str) else by)
    if name is None:
        raise InvalidInput(f"by={shown(by)}: say who, such as by='ann': {A_NAME}")
    return str.__str__(name)


def role_names(roles: Any) -> tuple[str, ...]:
    # A string is a sequence too. Without this check, each letter of the string would count as a role.
    if not isinstance(roles, (list, tuple)):
        raise InvalidInput(f"roles={shown(roles)}: a list of names, such as roles=['finance']")
    return tuple(map(_role, roles))


def _role(role: str) -> str:
    known = same_name(role)
    if known is None:
        raise InvalidInput(f"roles: {shown(role)} is no role, such as 'finance': {A_NAME}")
    return known


def words(text: str | None, what: str) -> str | None:
    """A note or a reason that a person gave, cleaned for the journal."""
    if text is not None and not isinstance(text, str):
        raise InvalidInput(f"{what}={shown(text)}: text, or None")
    return None if text is None else clean(text, 2000)
