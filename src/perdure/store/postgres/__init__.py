"""The journal on PostgreSQL. Everything that differs from SQLite, and why:

- **Several writers at a time.** A transaction locks the rows that it reads in order to change them: first the runs, in
  ascending order of their keys, then the budgets. Claims and notices skip rows that other transactions have locked.
  Only the statements differ (`queries.sql`), the logic is the same. If there is still a deadlock, the server rolls one
  transaction back, and that transaction is done again (`database.py`).
- **A commit crosses a network.** Appends of many runs are one statement (`journal.py`), which the event loop sends
  without waiting (`wire.py`). Everything else is sent from threads.
- **The answer to a commit can be lost.** For a transaction, its number says whether it has ended, and its rows prove
  that it was committed (`database.py`). An append that is one statement is repeated only after a new nonce was
  written (a fence). This write waits for the first append if that is still under way, and makes the server refuse
  the first append if it comes late (`journal.py`).
- **Several machines.** Leases are judged by the clock of the database. A lock file proves a death on the same machine
  only; for a worker on another machine, a connection that is gone for some seconds counts as silence (`liveness.py`,
  `claims.py`). The clocks of workers follow the clock of the database.
- **The bell** is NOTIFY, sent after the commit, once for several commits. If the bell is not heard, processes still
  poll once a second (`bell.py`).
- **Text cannot contain NUL**: in the projection NUL is shown as ␀; in the journal's JSON it is escaped. JSON is
  decoded in Python, not in SQL.
- **Order of creation** is (transaction, id), since ids are not given in the order of commits.
- **A transaction tool** is restricted by a check of the text of its statements, because PostgreSQL has no authorizer
  (`tool_connection.py`).
"""
