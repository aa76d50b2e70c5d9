"""Move money between accounts in the journal's own database: the booking and its record are one commit.

    perdure run examples/ledger.py:set_up --id accounts             once, as the owner of the tables
    perdure run examples/ledger.py:transfer source=ann target=bob cents:=2500 --id pay-1
    perdure run examples/ledger.py:transfer source=ann target=bob cents:=2500 --id pay-1    no second booking
    perdure run examples/ledger.py:statement --id statement-1

The same code works on SQLite and PostgreSQL (`--url postgresql://…`): parameters are `?` or `:name`, and both databases
understand the SQL. The table is created beforehand: on PostgreSQL even CREATE TABLE IF NOT EXISTS needs a right that
workers should not have.
"""

from __future__ import annotations

from perdure import Call, Fatal, Run, ToolFailed, agent, tool

OPENING_CENTS = 10_000


@tool(effect="transaction")
def make_table(call: Call) -> None:
    call.connection.execute("CREATE TABLE accounts (name TEXT PRIMARY KEY, cents BIGINT NOT NULL CHECK (cents >= 0))")


@tool(effect="transaction")
def open_account(name: str, call: Call) -> int:
    """Open the account with an opening balance, unless it exists; return its balance."""
    call.connection.execute("INSERT INTO accounts (name, cents) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (name, OPENING_CENTS))
    return balance(name, call)


@tool(effect="transaction")
def book(source: str, target: str, cents: int, call: Call) -> dict[str, int]:
    """Take from one account and give to the other, in one commit. A kill before the commit changes nothing."""
    # Update accounts in a fixed order: otherwise two opposite transfers could wait for each other on PostgreSQL.
    for name, change in sorted(((source, -cents), (target, cents))):
        booked = call.connection.execute(
            "UPDATE accounts SET cents = cents + :change WHERE name = :name AND cents + :change >= 0 RETURNING cents",
            {"change": change, "name": name},
        )
        if not booked:
            raise Fatal(f"{source} has less than {cents}")  # everything that was written before is rolled back
    return {name: balance(name, call) for name in (source, target)}


def balance(name: str, call: Call) -> int:
    [(cents,)] = call.connection.execute("SELECT cents FROM accounts WHERE name = ?", (name,))
    return int(cents)


@tool(effect="transaction")
def read_accounts(call: Call) -> dict[str, int]:
    """All accounts."""
    return {name: int(cents) for name, cents in call.connection.execute("SELECT name, cents FROM accounts ORDER BY name")}


@agent(version="1")
async def set_up(run: Run) -> str:
    """Create the table. Start this run with a fixed id, so that it happens once."""
    await make_table()
    return "there are accounts"


@agent(version="1")
async def transfer(run: Run, source: str, target: str, cents: int) -> str:
    """Move the money, and return the new balances or the reason why not."""
    for name in sorted({source, target}):
        await open_account(name)
    try:
        after = await book(source, target, cents)
    except ToolFailed as failure:  # the same on every replay
        return f"not booked: {failure.message}"
    return f"{source} has {after[source]}, {target} has {after[target]}"


@agent(version="1")
async def statement(run: Run) -> dict[str, int]:
    return await read_accounts()
