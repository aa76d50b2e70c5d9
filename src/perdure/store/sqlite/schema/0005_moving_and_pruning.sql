-- A journal that has moved elsewhere, runs that were pruned, and views for people at a prompt.

-- At most one row: from then on this journal takes nothing more, or the same run would go on in two places.
CREATE TABLE perdure_moved (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    state TEXT NOT NULL CHECK (state IN ('moving', 'moved')),
    to_url TEXT NOT NULL, -- without user and password
    by TEXT NOT NULL,
    at INTEGER NOT NULL
) STRICT;

-- What is left of a run that was deleted: its id is never used again (T14), and its head can be compared with one that was kept elsewhere.
CREATE TABLE perdure_pruned (
    id INTEGER PRIMARY KEY,
    number INTEGER UNIQUE, -- of its row here; NULL when it was pruned in another journal, from which this one was copied
    run_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    tenant TEXT NOT NULL,
    status TEXT NOT NULL, -- 'returned': a copy that was taken back when its move was abandoned; its id is free
    events INTEGER NOT NULL,
    head BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    finished_at INTEGER NOT NULL,
    pruned_at INTEGER NOT NULL,
    by TEXT NOT NULL
) STRICT;

CREATE INDEX perdure_pruned_run ON perdure_pruned (run_id);

-- Which runs have put a blob there: one that nobody has is deleted with the last family that had it.
CREATE TABLE perdure_blob_uses (
    run INTEGER NOT NULL,
    digest BLOB NOT NULL,
    PRIMARY KEY (run, digest)
) STRICT, WITHOUT ROWID;

CREATE INDEX perdure_blob_uses_digest ON perdure_blob_uses (digest);

-- Events that were written before this table was there. Text that only looks like the name of a blob makes no row.
INSERT OR IGNORE INTO perdure_blob_uses (run, digest)
SELECT e.id >> 32, b.digest
FROM perdure_events AS e, json_tree(e.data) AS node JOIN perdure_blobs AS b ON b.digest = unhex(node.value)
WHERE instr(e.data, '"blob":"') > 0 AND json_valid(e.data) AND node.key = 'blob' AND node.type = 'text' AND length(node.value) = 64;

CREATE INDEX perdure_notices_run ON perdure_notices (run);

-- == Nothing gets into a journal that has moved ======================================================================
-- The words are the same everywhere: the code knows them, and says where to.

CREATE TRIGGER perdure_events_open AFTER INSERT ON perdure_events
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_runs_open AFTER UPDATE ON perdure_runs
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_runs_none_new BEFORE INSERT ON perdure_runs
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_inbox_open BEFORE INSERT ON perdure_inbox
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_approvals_none_new BEFORE INSERT ON perdure_approvals
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_approvals_open BEFORE UPDATE ON perdure_approvals
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

-- They are sent from where the journal is now.
CREATE TRIGGER perdure_notices_open BEFORE UPDATE ON perdure_notices
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_workers_open BEFORE INSERT ON perdure_workers
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

-- == What may be deleted: all of a run for which there is a tombstone ================================================

DROP TRIGGER perdure_events_no_delete;
CREATE TRIGGER perdure_events_no_delete BEFORE DELETE ON perdure_events
WHEN NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE number = OLD.id >> 32)
BEGIN
    SELECT raise(ABORT, 'perdure_events is append-only');
END;

DROP TRIGGER perdure_runs_no_delete;
CREATE TRIGGER perdure_runs_no_delete BEFORE DELETE ON perdure_runs
WHEN NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE number = OLD.id)
BEGIN
    SELECT raise(ABORT, 'a run and its journal stay together');
END;

DROP TRIGGER perdure_approvals_no_delete;
CREATE TRIGGER perdure_approvals_no_delete BEFORE DELETE ON perdure_approvals
WHEN NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE number = OLD.run)
BEGIN
    SELECT raise(ABORT, 'an approval stays with its run');
END;

-- SQLite would give the number of the youngest run, once that is pruned, to the next one; and an id is used once (T14).
CREATE TRIGGER perdure_runs_fresh AFTER INSERT ON perdure_runs
WHEN EXISTS (SELECT 1 FROM perdure_pruned WHERE number >= NEW.id)
    OR EXISTS (SELECT 1 FROM perdure_pruned WHERE run_id = NEW.run_id AND status <> 'returned')
BEGIN
    SELECT raise(ABORT, 'what a pruned run was called is not used again');
END;

-- A tombstone says of a run what is true of it, and only of one that has finished, or that was copied here and nobody holds.
CREATE TRIGGER perdure_pruned_true BEFORE INSERT ON perdure_pruned
WHEN CASE WHEN NEW.number IS NULL THEN EXISTS (SELECT 1 FROM perdure_runs WHERE run_id = NEW.run_id)
    ELSE NOT EXISTS (
        SELECT 1 FROM perdure_runs AS r
        WHERE r.id = NEW.number AND r.run_id = NEW.run_id AND r.seq = NEW.events AND r.head = NEW.head AND r.holder IS NULL
            AND (NEW.status = 'returned' OR NEW.status = r.status AND r.status IN ('succeeded', 'failed', 'cancelled'))) END
BEGIN
    SELECT raise(ABORT, 'only a finished run can be pruned');
END;

CREATE TRIGGER perdure_pruned_open BEFORE INSERT ON perdure_pruned
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_pruned_no_update BEFORE UPDATE ON perdure_pruned
BEGIN
    SELECT raise(ABORT, 'a tombstone stays');
END;

CREATE TRIGGER perdure_pruned_no_delete BEFORE DELETE ON perdure_pruned
BEGIN
    SELECT raise(ABORT, 'a tombstone stays');
END;

-- == For people at a prompt ==========================================================================================

-- Every run on one line. Times are UTC.
CREATE VIEW perdure_status AS
SELECT r.run_id, r.agent, r.version, r.tenant, r.queue, r.priority, r.status, r.waiting_for, r.attention, r.error, r.seq AS events,
    ifnull(w.name, r.holder) AS worker, r.crashes, r.parent,
    datetime(r.ready_at / 1000000, 'unixepoch') || printf('.%06dZ', r.ready_at % 1000000) AS ready_at,
    datetime(r.created_at / 1000000, 'unixepoch') || printf('.%06dZ', r.created_at % 1000000) AS created_at,
    datetime(r.updated_at / 1000000, 'unixepoch') || printf('.%06dZ', r.updated_at % 1000000) AS updated_at
FROM perdure_runs AS r LEFT JOIN perdure_workers AS w ON w.worker = r.holder;

-- Every call of a tool on one line: what was to happen, under which key, and whether it has. Times are UTC.
-- From runs to events and grouped by run_id, so that a question about one run reads that run alone.
CREATE VIEW perdure_effects AS
WITH calls AS (
    SELECT r.run_id, e.call, max(e.id) AS last,
        max(iif(json_valid(e.data), e.data ->> '$.tool', NULL)) AS tool,
        max(iif(json_valid(e.data), e.data ->> '$.effect', NULL)) AS effect,
        max(iif(json_valid(e.data), e.data ->> '$.key', NULL)) AS key,
        max(iif(json_valid(e.data) AND e.data ->> '$.type' = 'tool_call_initiated', ifnull(e.data ->> '$.attempt', 1), 0)) AS attempts,
        min(iif(json_valid(e.data) AND e.data ->> '$.type' = 'tool_call_initiated', e.ts, NULL)) AS started_at
    FROM perdure_runs AS r CROSS JOIN perdure_events AS e ON e.id > r.id << 32 AND e.id <= (r.id << 32 | 4294967295)
    WHERE e.call IS NOT NULL AND (e.data LIKE '{"type":"tool\_call\_%' ESCAPE '\' OR e.data LIKE '{"type":"retry\_scheduled"%' ESCAPE '\')
    GROUP BY r.run_id, e.call
), stood AS (
    SELECT c.*, l.ts AS last_at, CASE iif(json_valid(l.data), l.data ->> '$.type', NULL)
        WHEN 'tool_call_proposed' THEN 'waiting for ' || (l.data ->> '$.until')
        WHEN 'tool_call_initiated' THEN 'started'
        WHEN 'tool_call_completed' THEN 'done'
        WHEN 'tool_call_in_doubt' THEN 'in doubt'
        WHEN 'tool_call_failed' THEN iif(l.data ->> '$.final', 'failed', 'waiting to be tried again')
        WHEN 'tool_call_resolved' THEN CASE l.data ->> '$.outcome' WHEN 'happened' THEN 'done' WHEN 'failed' THEN 'failed'
            ELSE 'waiting to be tried again' END
        WHEN 'retry_scheduled' THEN 'waiting to be tried again' END AS state
    FROM calls AS c CROSS JOIN perdure_events AS l ON l.id = c.last
)
SELECT run_id, call, tool, effect, key, attempts, state,
    datetime(started_at / 1000000, 'unixepoch') || printf('.%06dZ', started_at % 1000000) AS started_at,
    CASE WHEN state IN ('done', 'failed') THEN datetime(last_at / 1000000, 'unixepoch') || printf('.%06dZ', last_at % 1000000) END AS ended_at
FROM stood WHERE tool IS NOT NULL;
