"""The connection to PostgreSQL.

A death before every statement, statements that outlive their sender, a stopped process.

test_disk.py tests the same for SQLite.
"""

from __future__ import annotations

import itertools
import os
import signal
import time

import psycopg
import pytest
from tests.crash import victims
from tests.crash.checks import check_journal, check_succeeded
from tests.crash.errands import ORDER
from tests.crash.scenarios import SHORT, check_one_effect_each, claims
from tests.crash.world import KILLED, RUN, World
from tests.crash.worlds import Worlds

pytestmark = pytest.mark.parametrize("dialect", ["postgres"], indirect=True)

PARTS = ("keyed", "once_reconcile", "transaction") * 2
# The servers of clients that are silent inside a transaction.
INSIDE = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
# The store does this to the runs of a dead worker.
LOSE = "UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = 2, ready_at = 0, status = 'queued' WHERE run_id = 'r'"


@pytest.mark.long
@pytest.mark.parametrize(("part", "kind"), list(enumerate(PARTS)))
def test_killed_before_any_single_statement_of_a_whole_run_the_run_ends_well(worlds: Worlds, part: int, kind: str) -> None:
    """From the first connection, which makes the schema, to the last commit. Each part dies at its own sixth of the statements."""
    deaths = 0
    for nth in itertools.count(1 + part, len(PARTS)):
        world = worlds.new(empty=True)
        code = world.run(victims.errand, report=world.report(), run_id=RUN, kind=kind, die=["wire", "op", nth])
        if code == 0:
            break
        assert code == KILLED, world.log()
        deaths += 1
        told = world.resume(kind=kind)
        assert told["status"] == "succeeded", (nth, told, world.log())
        # The complete check runs only at every fourth death, because it takes longer than the crash.
        if deaths % 4 == 0:
            check_succeeded(world, told, kind)
        else:
            check_journal(world)
        assert len(world.ledger.effects(ORDER) or world.paid()) == 1, nth
        worlds.close_one(world)
    assert deaths > 4, f"only {deaths} deaths: the wire was not the one that kills"


def check_a_statement_that_outlives_its_sender(world: World, *, taken_first: bool) -> None:
    """The server has the result of `a` and the intent of `b`, and waits for the row.

    The process that sent them is dead.
    """
    world.begin(r=[["work", "a", 3.0], ["work", "b", 0]])  # until `a` ends there is time to lock the row, also on a busy machine
    with psycopg.connect(world.journal.url, application_name="looking") as connection:
        dead = world.start(victims.drive, run_id="r", report=world.report(), die=["intent", "handed", 2, "work"])
        world.ledger.wait_for(lambda lines: any(line["fact"] == "effect" for line in lines))
        connection.execute("SELECT 1 FROM perdure_runs WHERE run_id = 'r' FOR NO KEY UPDATE")
        assert world.wait(dead, settled=False) == KILLED, world.log()
        heir = world.start(victims.serve, until=["r"])
        time.sleep(0.5)  # the heir looks for runs of the dead meanwhile, and passes this one by
        if taken_first:
            connection.execute(LOSE.encode())
        connection.commit()
    assert world.wait(heir) == 0, world.log()
    _, events = world.peek("r")
    mine = [event.type for event in events if event.epoch == 1]
    if taken_first:
        assert "tool_call_completed" not in mine, "what a dead worker had sent was written after its run had been taken"
        assert len(world.ledger.lines("dropped", "r")) == 1, "its call was not made again"
    else:
        assert mine[-2:] == ["tool_call_completed", "tool_call_initiated"], mine
        assert not world.ledger.lines("dropped", "r"), "what was recorded as done was done again"
    assert [claim.takeover for claim in claims(world, "r")] == [False, True]
    check_one_effect_each(world, "r", ["a", "b"])
    check_journal(world, "r")


@pytest.mark.parametrize("taken_first", [False, True])
def test_what_a_dead_worker_has_sent_counts_when_it_is_done_before_its_run_is_taken_and_is_refused_after(
    world: World, taken_first: bool
) -> None:
    check_a_statement_that_outlives_its_sender(world, taken_first=taken_first)


def test_the_check_goes_red_when_the_guard_is_off(worlds: Worlds) -> None:
    with pytest.raises(AssertionError, match="written after its run had been taken"):
        check_a_statement_that_outlives_its_sender(worlds.new("the_guard_is_off"), taken_first=True)


def test_a_worker_that_sleeps_inside_a_transaction_keeps_its_run_from_others_only_until_the_server_ends_that(world: World) -> None:
    """It has the row locked, and a lease that has run out does not help as long as it has (`idle_in_transaction_session_timeout`)."""
    assert world.run(victims.start, runs={RUN: [0.05]}, agent="asker") == 0
    world.begin(other=[["deed", "o", 0]])
    zombie = world.start(victims.serve, settings={**SHORT, "answer_s": 15.0, "concurrency": 1}, die=["request", "frozen", 1])
    world.wait_until(lambda: is_stopped(zombie), "it sleeps inside its transaction")
    with psycopg.connect(world.journal.url, autocommit=True, application_name="looking") as connection:
        ((backend,),) = connection.execute(f"{INSIDE} AND application_name = 'perdure'".encode()).fetchall()

        def is_inside() -> bool:
            return bool(connection.execute(f"{INSIDE} AND pid = {backend}".encode()).fetchall())

        heir = world.start(victims.serve, until=[RUN, "other"], settings={**SHORT, "answer_s": 4.0})
        try:
            world.ledger.wait_for(lambda lines: any(line["what"] == "o" for line in lines))
            assert is_inside(), "the heir was too late to meet the sleeper inside its transaction"
            woken = world.ledger.effects("woken")
            while is_inside():
                assert not woken, "the run was taken from a worker whose transaction has it locked"
                time.sleep(0.05)
                woken = world.ledger.effects("woken")
            assert world.wait(heir) == 0, world.log()
        finally:
            os.kill(zombie, signal.SIGCONT)
    os.kill(zombie, signal.SIGTERM)
    assert world.wait(zombie) == 0, world.log()
    assert [claim.takeover for claim in claims(world, RUN)][:2] == [False, True]
    check_one_effect_each(world, RUN, ["woken"])
    check_journal(world)


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"
