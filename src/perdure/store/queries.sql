-- Every statement that perdure sends to SQLite, under the name by which the code calls it.
-- Values come in as parameters only; nothing here is ever assembled from data.

-- name: begin
-- Takes the write lock at once, so that nothing can come between the guard and the insert.
BEGIN IMMEDIATE

-- name: commit
COMMIT

-- name: rollback
ROLLBACK

-- == The append path ==================================================================================================

-- name: advance
-- The guard: exactly one row changes, or somebody else has the run or its seq has moved.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2, head), updated_at = max(updated_at, ?3)
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_project
-- The guard, and what the events did to the projection. `holder` and `ready_at` stay as they are, and so do their indexes.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2, head), updated_at = max(updated_at, ?3),
    status = ?9, waiting_for = ?10, error = ?11, crashes = iif(?12, 0, crashes)
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_release
-- The guard, and the holder gives the run up: to whoever claims it from ready_at on, or for good.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2, head), updated_at = max(updated_at, ?3),
    status = ?9, waiting_for = ?10, error = ?11, crashes = iif(?12, 0, crashes), ready_at = ?13, holder = NULL, nonce = NULL
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: insert_event
INSERT INTO perdure_events (id, event_id, ts, epoch, call, cause, data, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_blob
-- Content-addressed: a second copy of the same bytes is the same blob.
INSERT OR IGNORE INTO perdure_blobs (digest, data) VALUES (?, ?)

-- name: consume_inbox
-- The events of this commit stand for these rows now.
DELETE FROM perdure_inbox WHERE id = ? AND run = ?

-- name: unread_inbox_of_run
-- Whether anything has arrived that this commit does not stand for.
SELECT 1 FROM perdure_inbox WHERE run = ? AND id NOT IN (SELECT value FROM json_each(?)) LIMIT 1

-- name: forget_inbox
-- A finished run reads nothing more.
DELETE FROM perdure_inbox WHERE run = ?

-- name: guard_of_run
-- What a refused append ran into, to say so in words.
SELECT status, seq, epoch, holder, nonce FROM perdure_runs WHERE id = ?

-- name: run_key
SELECT id FROM perdure_runs WHERE run_id = ?

-- name: event_at
SELECT event_id FROM perdure_events WHERE id = (? << 32 | ?)

-- == Reading ==========================================================================================================

-- name: run_by_id
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, id, lost
FROM perdure_runs WHERE run_id = ?

-- name: list_runs
-- Newest first. created_at pages, and id settles ties.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, id, lost
FROM perdure_runs
WHERE (:before IS NULL OR created_at < :before)
    AND (:status IS NULL OR status = :status)
    AND (:agent IS NULL OR agent = :agent)
    AND (:tenant IS NULL OR tenant = :tenant)
ORDER BY created_at DESC, id DESC LIMIT :limit

-- name: read_events
-- data as a blob: the very bytes that were hashed, even when they are no longer text.
SELECT seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB)
FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = ?1) + ?2 AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = ?1) + 4294967296 ORDER BY id

-- name: stored_events
SELECT seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB), hash
FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = ?1) AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = ?1) + 4294967296 ORDER BY id

-- name: hash_at
SELECT hash FROM perdure_events WHERE id = (SELECT id << 32 FROM perdure_runs WHERE run_id = ?1) + ?2

-- name: growing_runs
-- What may have changed since somebody knew all runs up to :newest: those that are new, and those that had not finished.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, id, lost
FROM perdure_runs
WHERE id > :after AND (id > :newest OR status NOT IN ('succeeded', 'failed', 'cancelled'))
ORDER BY id LIMIT :limit

-- name: journals_without_run
-- From the first event of one journal straight to that of the next, however long they are. UNION: a forged key must not lead in circles.
-- `number`, not `run`: inside, that would be the column of perdure_events.
WITH RECURSIVE journals (number) AS (
    SELECT min(id) >> 32 FROM perdure_events
    UNION
    SELECT (SELECT min(id) >> 32 FROM perdure_events WHERE id >= (number + 1) << 32) FROM journals WHERE number IS NOT NULL
)
SELECT number,
    (SELECT count(*) FROM perdure_events WHERE id >= number << 32 AND id <= (number << 32 | 4294967295)),
    (SELECT CAST(iif(json_valid(data), data ->> '$.run_id', NULL) AS BLOB) FROM perdure_events WHERE id = (number << 32 | 1))
FROM journals WHERE number IS NOT NULL AND number NOT IN (SELECT id FROM perdure_runs)

-- name: schema_objects
SELECT type, name, sql FROM sqlite_schema WHERE name LIKE 'perdure\_%' ESCAPE '\' ORDER BY type, name

-- name: blob
SELECT data FROM perdure_blobs WHERE digest = ?

-- name: data_version
PRAGMA data_version

-- == Creating and posting =============================================================================================

-- name: insert_run
INSERT INTO perdure_runs (run_id, agent, version, tenant, actor, queue, target, input_digest, status, ready_at, seq, head, epoch,
    created_at, updated_at)
VALUES (:run_id, :agent, :version, :tenant, :actor, :queue, :target, :input_digest, 'queued', :ts, 1, :head, 0, :ts, :ts)
RETURNING id

-- name: post_to_unheld
-- Nobody holds the run (or a dead worker does): what was posted is in its journal, and anybody may claim it.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = max(updated_at, :now), status = :status, waiting_for = NULL,
    ready_at = :now, holder = NULL, nonce = NULL, lost = iif(holder IS NULL, lost, 2)
WHERE id = :id

-- name: insert_inbox
INSERT INTO perdure_inbox (run, call, event_id, ts, data) VALUES (:id, :call, :event_id, :now, :data)

-- name: event_of_run
-- Whether a post has arrived in the journal, asked after a COMMIT with an unknown outcome.
SELECT 1 FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = ?1) AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = ?1) + 4294967296 AND event_id = ?2

-- name: inbox_event_of_run
-- Whether a post has arrived in the inbox, asked after a COMMIT with an unknown outcome.
SELECT 1 FROM perdure_inbox WHERE run = (SELECT id FROM perdure_runs WHERE run_id = ?) AND event_id = ?

-- name: inbox_of_worker
SELECT i.id, r.run_id, i.call, CAST(i.data AS BLOB)
FROM perdure_inbox AS i JOIN perdure_runs AS r ON r.id = i.run WHERE r.holder = ? ORDER BY i.id

-- == Who works ========================================================================================================

-- name: claimable_runs
-- The ready runs of the served agents that have waited longest. Suspects only when the worker holds none.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, id, lost
FROM perdure_runs
WHERE ready_at <= :now AND agent IN (SELECT value FROM json_each(:served))
    AND (crashes + (lost > 0) < 2 OR NOT EXISTS (SELECT 1 FROM perdure_runs AS held WHERE held.holder = :worker AND held.crashes >= 2))
ORDER BY ready_at, id LIMIT :limit

-- name: claim_run
-- A new epoch over the old one: whoever held the run before is refused from here on.
UPDATE perdure_runs SET epoch = :epoch, nonce = :nonce, holder = :worker, seq = :seq, head = :head, crashes = :crashes,
    lost = 0, ready_at = NULL, waiting_for = NULL, error = NULL, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'running')
WHERE id = :id

-- name: next_ready
SELECT ready_at FROM perdure_runs
WHERE ready_at IS NOT NULL AND agent IN (SELECT value FROM json_each(?)) ORDER BY ready_at LIMIT 1

-- name: insert_worker
INSERT INTO perdure_workers (worker, name, pid, started_at, beat_at) VALUES (:worker, :name, :pid, :now, :now)
ON CONFLICT (worker) DO UPDATE SET name = excluded.name, pid = excluded.pid, started_at = excluded.started_at, beat_at = excluded.beat_at

-- name: delete_worker
DELETE FROM perdure_workers WHERE worker = ?

-- name: beat
UPDATE perdure_workers SET beat_at = max(beat_at, ?) WHERE worker = ?

-- name: worker_by_id
SELECT name, beat_at FROM perdure_workers WHERE worker = ?

-- name: list_workers
SELECT worker, name, pid, started_at, beat_at, (SELECT count(*) FROM perdure_runs WHERE holder = worker)
FROM perdure_workers ORDER BY started_at, worker

-- name: holders_without_worker
SELECT DISTINCT holder FROM perdure_runs
WHERE holder IS NOT NULL AND holder NOT IN (SELECT worker FROM perdure_workers)

-- name: lose_runs
-- Their holder is gone: claimable at once, and the next claim knows that it is a takeover.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued')
WHERE holder = :worker

-- name: lose_runs_of_silent_worker
-- As lose_runs, unless the worker has given a sign of life since we looked.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = 1, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued')
WHERE holder = :worker AND EXISTS (SELECT 1 FROM perdure_workers AS w WHERE w.worker = :worker AND w.beat_at < :before)

-- == Opening ==========================================================================================================

-- name: has_schema_table
SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'perdure_schema'

-- name: applied_migrations
SELECT version, checksum FROM perdure_schema ORDER BY version

-- name: record_migration
INSERT INTO perdure_schema (version, checksum, applied_at) VALUES (?, ?, CAST(unixepoch('subsec') * 1000000 AS INTEGER))
