-- What a run can wait for without a process: approvals, children, signals, budgets; and what people should hear of.

ALTER TABLE perdure_runs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE perdure_runs ADD COLUMN attention TEXT; -- why it needs attention
ALTER TABLE perdure_runs ADD COLUMN parent TEXT; -- run_id
ALTER TABLE perdure_runs ADD COLUMN parent_call INTEGER;
ALTER TABLE perdure_runs ADD COLUMN parent_seq INTEGER; -- of the parent's child_started
ALTER TABLE perdure_runs ADD COLUMN depth INTEGER NOT NULL DEFAULT 0;
ALTER TABLE perdure_runs ADD COLUMN ledger INTEGER; -- the run whose budget applies first: this one, or the nearest above it

CREATE INDEX perdure_runs_ledger ON perdure_runs (ledger) WHERE ledger IS NOT NULL;

UPDATE perdure_runs SET attention = (
    SELECT e.data ->> '$.reason' FROM perdure_events AS e
    WHERE e.id > perdure_runs.id << 32 AND e.id <= (perdure_runs.id << 32 | 4294967295) AND e.type = 'attention_needed'
    ORDER BY e.id DESC LIMIT 1)
WHERE status = 'needs_attention';

-- What was asked lies in the journal, at (run, seq); here is what became of it.
CREATE TABLE perdure_approvals (
    id INTEGER PRIMARY KEY,
    approval TEXT NOT NULL UNIQUE,
    run INTEGER NOT NULL REFERENCES perdure_runs (id),
    seq INTEGER NOT NULL, -- of its approval_requested
    call INTEGER NOT NULL,
    action TEXT NOT NULL,
    asked_at INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'approved', 'rejected', 'expired', 'withdrawn', 'consumed')),
    deciders TEXT NOT NULL, -- JSON: who may decide, as of now
    expires_at INTEGER,
    escalated INTEGER NOT NULL DEFAULT 0,
    voters TEXT NOT NULL DEFAULT '[]', -- JSON: who has agreed
    digest TEXT NOT NULL DEFAULT '', -- of what is approved
    settled_by TEXT,
    note TEXT,
    settled_at INTEGER
) STRICT;

CREATE INDEX perdure_approvals_run ON perdure_approvals (run);
CREATE INDEX perdure_approvals_status ON perdure_approvals (status, expires_at);

-- One decision counts, whoever writes: a yes can still be used, lapse or be withdrawn, and everything else is the end (T17).
CREATE TRIGGER perdure_approvals_settled BEFORE UPDATE ON perdure_approvals
WHEN OLD.status NOT IN ('pending', 'approved')
    OR OLD.status = 'approved' AND NEW.status NOT IN ('consumed', 'expired', 'withdrawn')
    OR OLD.status = 'pending' AND NEW.status = 'consumed'
BEGIN
    SELECT raise(ABORT, 'an approval that is settled stays so');
END;

CREATE TRIGGER perdure_approvals_no_delete BEFORE DELETE ON perdure_approvals
BEGIN
    SELECT raise(ABORT, 'an approval stays with its run');
END;

-- Keys of signals that a run has had.
CREATE TABLE perdure_signals (
    run INTEGER NOT NULL REFERENCES perdure_runs (id),
    topic TEXT NOT NULL,
    key TEXT NOT NULL,
    PRIMARY KEY (run, topic, key)
) STRICT, WITHOUT ROWID;

-- NULL: no limit. What is spent and reserved here is counted in every budget above it as well.
CREATE TABLE perdure_budgets (
    run INTEGER PRIMARY KEY REFERENCES perdure_runs (id),
    above INTEGER REFERENCES perdure_budgets (run),
    limit_usd_micros INTEGER,
    limit_tokens INTEGER,
    limit_calls INTEGER,
    limit_busy_us INTEGER,
    on_exceed TEXT NOT NULL,
    spent_usd_micros INTEGER NOT NULL DEFAULT 0,
    spent_tokens INTEGER NOT NULL DEFAULT 0,
    spent_calls INTEGER NOT NULL DEFAULT 0,
    spent_busy_us INTEGER NOT NULL DEFAULT 0,
    reserved_usd_micros INTEGER NOT NULL DEFAULT 0,
    reserved_tokens INTEGER NOT NULL DEFAULT 0,
    reserved_calls INTEGER NOT NULL DEFAULT 0,
    reserved_busy_us INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE INDEX perdure_budgets_above ON perdure_budgets (above) WHERE above IS NOT NULL;

-- What of all those reservations is a run's own: whatever is left of it when the run ends is given back.
CREATE TABLE perdure_reserved (
    run INTEGER PRIMARY KEY REFERENCES perdure_runs (id),
    usd_micros INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    busy_us INTEGER NOT NULL
) STRICT;

-- The outbox: written in the commit of the event that people should hear of, gone when it has been sent (T25).
-- AUTOINCREMENT: a late `done` must not remove somebody else's notice.
CREATE TABLE perdure_notices (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run INTEGER NOT NULL REFERENCES perdure_runs (id),
    seq INTEGER NOT NULL,
    next_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    error TEXT
) STRICT;

CREATE INDEX perdure_notices_due ON perdure_notices (next_at);
