"""The journal on PostgreSQL. Everything that differs from SQLite, and why:

- **Several writers at a time.** What is read in order to be changed is locked by row, several runs in ascending order of their numbers,
  each with its budgets after it; claims and notices pass by what others have locked. The statements say so (`queries.sql`), the logic
  is the same. Deadlocks that this order leaves possible are rolled back by the server and done again (`database.py`).
- **A commit crosses a network.** Appends of many runs are one statement (`journal.py`), which the event loop sends and does not wait
  for (`flight.py`, `wire.py`); everything else is asked on threads.
- **The answer to a commit can be lost.** A transaction is looked up by its number where the same server answers, else by its rows; an append that is one statement is fenced by a new
  nonce first, which waits for it if it is under way and refuses it if it comes late (`database.py`, `journal.py`).
- **Several machines.** Leases are judged by the clock of the database; a lock file proves a death on the same machine only; elsewhere a
  connection that is gone for some seconds counts as silence (`liveness.py`, `claims.py`). Workers' clocks follow the database's.
- **The doorbell** is NOTIFY, sent after the commit and coalesced; looking once a second is what makes sure (`bell.py`).
- **Text holds no NUL**: in the projection it is shown as ␀; the journal's JSON has it escaped. JSON is taken apart by us, not in SQL.
- **Order of creation** is (transaction, id), since ids are not given in the order of commits.
- **A transaction tool** is confined by the text of its statements, not by the database's own authorizer (`confined.py`).
"""
