-- The journal. Users' own tables may live in the same file (effect="transaction"), so that every name here begins with perdure_.

CREATE TABLE perdure_schema (
    version INTEGER PRIMARY KEY,
    checksum TEXT NOT NULL, -- SHA-256 of the file that made it
    applied_at INTEGER NOT NULL
) STRICT;

-- A run's projection. Written in the same commit as the events it follows from.
CREATE TABLE perdure_runs (
    id INTEGER PRIMARY KEY,
    run_id TEXT NOT NULL UNIQUE,
    agent TEXT NOT NULL,
    version TEXT NOT NULL,
    tenant TEXT NOT NULL,
    actor TEXT,
    queue TEXT NOT NULL,
    target TEXT,
    input_digest TEXT NOT NULL,
    status TEXT NOT NULL,
    waiting_for TEXT,
    ready_at INTEGER, -- NULL while somebody holds the run
    seq INTEGER NOT NULL,
    head BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    nonce BLOB, -- of the lease: an epoch alone could be guessed by a worker that was restored from a copy
    holder TEXT,
    lost INTEGER NOT NULL DEFAULT 0, -- the last holder did not give it up: 1 its lease ran out, 2 the kernel says that it is gone
    crashes INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    CHECK (holder IS NULL OR ready_at IS NULL)
) STRICT;

CREATE INDEX perdure_runs_ready ON perdure_runs (ready_at, agent) WHERE ready_at IS NOT NULL;
CREATE INDEX perdure_runs_held ON perdure_runs (holder) WHERE holder IS NOT NULL;
CREATE INDEX perdure_runs_created ON perdure_runs (created_at);

-- Clustered by run: a history is read with one range scan, and no second index has to be kept. One number instead of the pair
-- (run, seq), because SQLite appends to the end of an integer key without rebalancing the pages beside it.
-- `run` has no foreign key: the trigger below already looks the run up at every insert.
CREATE TABLE perdure_events (
    id INTEGER PRIMARY KEY, -- run << 32 | seq
    event_id BLOB NOT NULL CHECK (length(event_id) = 16),
    ts INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    call INTEGER,
    cause INTEGER,
    data TEXT NOT NULL, -- exactly the bytes that were hashed
    hash BLOB NOT NULL CHECK (length(hash) = 32),
    run INTEGER GENERATED ALWAYS AS (id >> 32) VIRTUAL,
    seq INTEGER GENERATED ALWAYS AS (id & 4294967295) VIRTUAL,
    type TEXT GENERATED ALWAYS AS (data ->> '$.type') VIRTUAL
) STRICT;

CREATE TABLE perdure_blobs (
    digest BLOB PRIMARY KEY CHECK (length(digest) = 32),
    data BLOB NOT NULL
) STRICT;

-- AUTOINCREMENT: an id is never used twice, or a late `consumed` could delete somebody else's row.
CREATE TABLE perdure_inbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL REFERENCES perdure_runs (id),
    call INTEGER,
    event_id BLOB NOT NULL,
    ts INTEGER NOT NULL,
    data TEXT NOT NULL
) STRICT;

CREATE INDEX perdure_inbox_run ON perdure_inbox (run);

CREATE TABLE perdure_workers (
    worker TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    pid INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    beat_at INTEGER NOT NULL
) STRICT;

CREATE TRIGGER perdure_events_no_update BEFORE UPDATE ON perdure_events
BEGIN
    SELECT raise(ABORT, 'perdure_events is append-only');
END;

CREATE TRIGGER perdure_events_no_delete BEFORE DELETE ON perdure_events
BEGIN
    SELECT raise(ABORT, 'perdure_events is append-only');
END;

-- Events follow the row, whose guard was checked: nothing gets in beside it. Together with the next trigger this is G10.
-- AFTER costs half as much as BEFORE, which would have to work out `type` at every insert.
CREATE TRIGGER perdure_events_guarded AFTER INSERT ON perdure_events
WHEN NEW.id & 4294967295 > ifnull((SELECT seq FROM perdure_runs WHERE id = NEW.id >> 32), 0)
BEGIN
    SELECT raise(ABORT, 'an event must be covered by the seq of its run');
END;

CREATE TRIGGER perdure_runs_finished BEFORE UPDATE OF seq, head, status, holder, ready_at ON perdure_runs
WHEN OLD.status IN ('succeeded', 'failed', 'cancelled')
BEGIN
    SELECT raise(ABORT, 'a finished run takes nothing more');
END;

CREATE TRIGGER perdure_runs_no_delete BEFORE DELETE ON perdure_runs
BEGIN
    SELECT raise(ABORT, 'a run and its journal stay together');
END;
