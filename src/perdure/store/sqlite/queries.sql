-- The statements that only SQLite gets, by name; common.sql has the others. Values are passed as parameters only; no
-- statement is ever assembled from data.

-- name: begin
-- Take the write lock at once, so that no other write can come between the guard and the insert.
BEGIN IMMEDIATE

-- name: commit
COMMIT

-- name: rollback
ROLLBACK

-- == The append path =================================================================================================

-- name: advance
-- The guard: exactly one row changes. If no row changes, another worker has the run, or the run's seq has changed.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2, head), updated_at = max(updated_at, ?3)
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_project
-- The guard, and the new projection. `holder` and `ready_at` are not set, so their indexes do not change.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2, head), updated_at = max(updated_at, ?3),
    status = ?9, waiting_for = ?10, error = ?11, crashes = iif(?12, 0, crashes), attention = ?13
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_release
-- The guard, and the holder releases the run. Any worker may claim the run from ready_at on; if ready_at is NULL, no
-- worker may.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2, head), updated_at = max(updated_at, ?3),
    status = ?9, waiting_for = ?10, error = ?11, crashes = iif(?12, 0, crashes), attention = ?13, ready_at = ?14, holder = NULL, nonce = NULL
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: insert_event
INSERT INTO perdure_events (id, event_id, ts, epoch, call, cause, data, hash) VALUES (?1 << 32 | ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)

-- name: copy_events
-- Copy the events of the run :parent up to :last, but not :others, to the run :run. The n-th 32 bytes of :hashes are the
-- hash of event n there.
INSERT INTO perdure_events (id, event_id, ts, epoch, call, cause, data, hash)
SELECT :run << 32 | seq, event_id, ts, epoch, call, cause, data, substr(:hashes, seq * 32 - 31, 32)
FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :parent)
    AND id <= (SELECT id << 32 FROM perdure_runs WHERE run_id = :parent) + :last AND seq NOT IN (SELECT value FROM json_each(:others))

-- name: unlinked_entries
-- The last linked entry of the journal-wide chain, and all entries after it.
SELECT n, run, seq, head, run_id, link FROM perdure_chain
WHERE n >= ifnull((SELECT n FROM perdure_chain WHERE link IS NOT NULL ORDER BY n DESC LIMIT 1), 0) ORDER BY n

-- name: link_entry
UPDATE perdure_chain SET link = ? WHERE n = ?

-- name: insert_blob
-- Content-addressed: a second copy of the same bytes is the same blob.
INSERT OR IGNORE INTO perdure_blobs (digest, data) VALUES (?, ?)

-- name: blobs_to_keep
-- The digests whose blobs exist. On SQLite that is every digest, since no other transaction writes meanwhile.
SELECT digest FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))

-- name: unread_inbox_of_run
-- Is there an inbox row that this commit does not record?
SELECT 1 FROM perdure_inbox WHERE run = ? AND id NOT IN (SELECT value FROM json_each(?)) LIMIT 1

-- name: event_at
-- The code identifies the event by its hash, not by its event id: an event from the inbox has the same event id,
-- even if another worker appends it.
SELECT hash FROM perdure_events WHERE id = (? << 32 | ?)

-- == Reading =========================================================================================================

-- name: ended
-- A part of other statements, in place of {ended}: the type of the run's last event if it is terminal, else NULL. If the
-- run's status is not one of a finished run, the row was edited, and nothing may be appended. `type` would parse the
-- event; its text begins with the type.
(SELECT CASE WHEN e.data GLOB '{"type":"run_succeeded"*' THEN 'run_succeeded' WHEN e.data GLOB '{"type":"run_failed"*' THEN 'run_failed'
    WHEN e.data GLOB '{"type":"run_cancelled"*' THEN 'run_cancelled' END
FROM perdure_events AS e WHERE e.id = (perdure_runs.id << 32 | perdure_runs.seq))

-- name: run_to_change
-- Like run_by_id. The row stays locked until this transaction ends: on SQLite no other transaction can write anyway.
SELECT {run}, {ended}
FROM perdure_runs WHERE run_id = ?

-- name: family_of_run
-- The unfinished runs below the run. A child's id is its parent's id, a slash and a number; '0' is the character after
-- '/'.
SELECT {run}
FROM perdure_runs
WHERE run_id > :run_id || '/' AND run_id < :run_id || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')

-- name: family_to_change
-- Like family_of_run, the oldest run first, in a transaction that changes these runs.
SELECT {run}, {ended}
FROM perdure_runs
WHERE run_id > :run_id || '/' AND run_id < :run_id || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')
ORDER BY id

-- name: current_of_runs
-- What the row of a run does not say: its last status text, its failure, and its attempts under way (the last event of
-- the call is an intent, and the run is held). The column `type` is not used, because it would parse each event; the
-- text of an event begins with its type.
WITH wanted AS (
    SELECT r.run_id, r.id, r.seq, r.status, r.holder FROM json_each(:runs) AS w JOIN perdure_runs AS r ON r.run_id = w.value
)
SELECT w.run_id, e.ts, e.call, CAST(e.data AS BLOB)
FROM wanted AS w JOIN perdure_events AS e ON e.id = (
    SELECT s.id FROM perdure_events AS s
    WHERE s.id > w.id << 32 AND s.id <= (w.id << 32 | w.seq) AND s.data LIKE '{"type":"status\_reported"%' ESCAPE '\'
    ORDER BY s.id DESC LIMIT 1)
UNION ALL
SELECT w.run_id, e.ts, e.call, CAST(e.data AS BLOB)
FROM wanted AS w JOIN perdure_events AS e ON e.id = (w.id << 32 | w.seq) WHERE w.status = 'failed'
UNION ALL
SELECT w.run_id, e.ts, e.call, CAST(e.data AS BLOB)
FROM wanted AS w JOIN perdure_events AS e ON e.id IN (
    SELECT max(c.id) FROM perdure_events AS c
    WHERE c.id > w.id << 32 AND c.id <= (w.id << 32 | w.seq) AND c.call IS NOT NULL GROUP BY c.call)
WHERE w.holder IS NOT NULL AND (e.data LIKE '{"type":"tool\_call\_initiated"%' ESCAPE '\' OR e.data LIKE '{"type":"model\_call\_initiated"%' ESCAPE '\')

-- name: read_events
-- Read `data` as a blob: so the code gets the very bytes that were hashed, even if they are damaged and not text any
-- more.
SELECT seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB)
FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + :after
    AND id <= (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + min(4294967295, ifnull(
        -- A page that begins in what was removed goes on behind it.
        (SELECT c.removed + :until - :after - (:after = 0) FROM perdure_checkpoints AS c JOIN perdure_runs AS r ON r.id = c.run
            WHERE r.run_id = :run_id AND c.removed > :after), :until))
ORDER BY id

-- name: read_life
-- The run's first event, and the events from its last checkpoint on. Without a checkpoint: all its events.
SELECT seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB)
FROM perdure_events WHERE id = (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + 1
UNION ALL
SELECT seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB)
FROM perdure_events WHERE id >= (SELECT (r.id << 32) + max(2, ifnull((SELECT c.seq FROM perdure_checkpoints AS c WHERE c.run = r.id), 0))
        FROM perdure_runs AS r WHERE r.run_id = :run_id)
    AND id <= (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + 4294967295
ORDER BY 1

-- name: read_events_of_runs
-- At most :limit events of each run. :after is a JSON object: run id → the seq of the last event that the reader has.
SELECT r.run_id, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, CAST(e.data AS BLOB)
FROM json_each(:after) AS w CROSS JOIN perdure_runs AS r ON r.run_id = w.key
    CROSS JOIN perdure_events AS e ON e.id > (r.id << 32) + w.value AND e.id <= (r.id << 32) + :limit + ifnull(
        (SELECT c.removed - (w.value = 0) FROM perdure_checkpoints AS c WHERE c.run = r.id AND c.removed > w.value), w.value)
ORDER BY e.id

-- name: watched_runs
-- Each watched run; and the unfinished runs below the runs in :families. The last column is the watched run.
SELECT {run}, watched
FROM (SELECT value AS watched FROM json_each(:run_ids)) CROSS JOIN perdure_runs ON run_id = watched
UNION ALL
SELECT {run}, watched
FROM (SELECT value AS watched FROM json_each(:families)) CROSS JOIN perdure_runs ON run_id > watched || '/' AND run_id < watched || '0'
WHERE status NOT IN ('succeeded', 'failed', 'cancelled')

-- name: first_events
SELECT id >> 32, seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB)
FROM perdure_events WHERE id IN (SELECT (value << 32) + 1 FROM json_each(?))

-- name: stored_events
-- For verify, which also has to find damage. If `data` is not text any more, it is NULL. A row whose column `run`
-- names another run is left out, even if its id is in the range of this run's ids.
SELECT seq, event_id, ts, epoch, call, cause, CASE typeof(data) WHEN 'text' THEN CAST(data AS BLOB) END, hash
FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id)
    AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + 4294967296
    AND run = (SELECT id FROM perdure_runs WHERE run_id = :run_id)
ORDER BY id

-- name: hash_at
SELECT hash FROM perdure_events WHERE id = (SELECT id << 32 FROM perdure_runs WHERE run_id = ?) + ?

-- name: hashes_of_run
SELECT hash FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + :after
    AND id <= (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + :until
ORDER BY id

-- name: growing_runs
-- The new runs (after :newest), the unfinished runs, and those that were reopened: see Reading.growing. A place is (0, id): with one writer at a
-- time, ids are given in the order of commits.
SELECT {run}, 0
FROM perdure_runs
WHERE id > :after AND (id > :newest OR status NOT IN ('succeeded', 'failed', 'cancelled') OR reopened > 0)
ORDER BY id LIMIT :limit

-- name: journals_without_run
-- Jump from the first event of one journal to the first event of the next journal, so that long journals cost nothing.
-- Use UNION, not UNION ALL: a forged key must not lead into an endless loop. The column is called `number`, because
-- `run` would be the column of perdure_events.
WITH RECURSIVE journals (number) AS (
    SELECT min(id) >> 32 FROM perdure_events
    UNION
    SELECT (SELECT min(id) >> 32 FROM perdure_events WHERE id >= (number + 1) << 32) FROM journals WHERE number IS NOT NULL
)
SELECT number,
    (SELECT count(*) FROM perdure_events WHERE id >= number << 32 AND id <= (number << 32 | 4294967295)),
    (SELECT CAST(iif(json_valid(data), data ->> '$.run_id', NULL) AS BLOB) FROM perdure_events WHERE id = (number << 32 | 1))
FROM journals WHERE number IS NOT NULL AND number NOT IN (SELECT id FROM perdure_runs)

-- name: chain_entries
SELECT 0, n, run, seq, head, run_id, link FROM perdure_chain WHERE n > :after AND :chain <= 0 ORDER BY n LIMIT :limit

-- name: chain_ends
SELECT 0, n, run, seq, head, run_id, link FROM perdure_chain WHERE link IS NOT NULL ORDER BY n DESC LIMIT 1

-- name: missing_heads
-- The runs that have lost an event: the chain has the event, the journal does not, and the run was not pruned. The
-- last two columns are the id and the last event of the run's row, if the row exists.
SELECT c.run, min(c.seq), max(c.seq), max(c.run_id), r.run_id, r.seq
FROM perdure_chain AS c LEFT JOIN perdure_runs AS r ON r.id = c.run LEFT JOIN perdure_events AS e ON e.id = (c.run << 32 | c.seq)
WHERE c.run > 0 AND (:run_id IS NULL OR r.run_id = :run_id) AND CASE WHEN r.id IS NULL THEN NOT EXISTS (SELECT 1 FROM perdure_pruned AS p WHERE p.number = c.run)
    ELSE r.seq < c.seq OR CASE WHEN e.id IS NOT NULL THEN substr(e.hash, 1, 16) <> c.head
        ELSE NOT EXISTS (SELECT 1 FROM perdure_checkpoints AS k WHERE k.run = c.run
            AND (c.seq > 1 AND c.seq < k.removed OR c.seq = k.removed AND substr(k.head, 1, 16) = c.head)) END END
GROUP BY c.run ORDER BY c.run

-- name: unchained_runs
-- The runs without a holder whose last event is not in the chain. A run with one event is new, and has no entry yet.
SELECT run_id, seq FROM perdure_runs AS r
WHERE holder IS NULL AND seq > 1 AND (:run_id IS NULL OR run_id = :run_id) AND (id << 32 | seq) NOT IN (SELECT run << 32 | seq FROM perdure_chain)
ORDER BY id

-- name: runs_in_no_line
SELECT count(*), min(run_id) FROM perdure_runs WHERE line IS NULL AND ready_at IS NOT NULL

-- name: schema_objects
SELECT type, name, sql FROM sqlite_schema WHERE name LIKE 'perdure\_%' ESCAPE '\' ORDER BY type, name

-- name: damage
-- Check every page, and every index against its table. A run that is missing from an index would not be listed, and so
-- would not be verified.
PRAGMA integrity_check(10)

-- name: data_version
PRAGMA data_version

-- == Creating and posting ============================================================================================

-- name: insert_run
-- A child is under its parent's budget, unless the child gets its own budget. No row is returned if the id is taken,
-- or belonged to a run that was pruned. The statement also computes a new key: by itself, SQLite would reuse the key
-- of the newest run after that run is deleted.
INSERT INTO perdure_runs (id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, ready_at, seq, head, epoch,
    created_at, updated_at, priority, parent, parent_call, parent_seq, depth, line, ledger)
SELECT max(ifnull((SELECT max(id) FROM perdure_runs), 0), ifnull((SELECT max(number) FROM perdure_pruned), 0)) + 1,
    :run_id, :agent, :version, :tenant, :actor, :queue, :target, :input_digest, 'queued', :ready_at, 1, :head, 0, :ts, :ts,
    :priority, :parent, :parent_call, :parent_seq, :depth, :line, (SELECT ledger FROM perdure_runs WHERE run_id = :parent)
WHERE NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE run_id IN (:run_id, :root) AND status <> 'returned')
ON CONFLICT (run_id) DO NOTHING RETURNING id, ledger

-- name: post_to_unheld
-- The run is not held, or its holder is dead, so the posted event goes into the journal.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = max(updated_at, :now), status = :status, waiting_for = :waiting_for,
    attention = iif(:status = 'needs_attention', attention, NULL), ready_at = :ready_at, holder = NULL, nonce = NULL,
    lost = iif(holder IS NULL, lost, 2), lost_with = iif(holder IS NULL, lost_with, :beside)
WHERE id = :id

-- name: end_unheld
-- Like post_to_unheld, for a terminal event.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = max(updated_at, :now), status = :status, waiting_for = NULL,
    attention = NULL, error = :error, crashes = 0, ready_at = NULL, holder = NULL, nonce = NULL
WHERE id = :id

-- name: reopen_run
-- Like post_to_unheld, for a run that a person has reopened, also after its end.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = max(updated_at, :now), status = 'queued', waiting_for = NULL,
    attention = NULL, error = NULL, crashes = 0, ready_at = :now, holder = NULL, nonce = NULL, lost = 0, lost_with = 0,
    reopened = reopened + 1
WHERE id = :id

-- name: first_event
SELECT CAST(data AS BLOB) FROM perdure_events WHERE id = (? << 32 | 1)

-- name: last_event_of_call
-- The event that a post about a call answers, if the sender does not name that event.
SELECT max(id) & 4294967295 FROM perdure_events WHERE id > (:id << 32) AND id <= (:id << 32 | 4294967295) AND call = :call

-- name: event_of_run
-- Is a posted event in the journal? The code asks after a COMMIT with unknown outcome.
SELECT 1 FROM perdure_events
WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id)
    AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + 4294967296 AND event_id = :event_id

-- name: inbox_of_worker
SELECT i.id, r.run_id, i.call, CAST(i.data AS BLOB), i.event_id
FROM perdure_inbox AS i JOIN perdure_runs AS r ON r.id = i.run WHERE r.holder = ? ORDER BY i.id

-- name: inbox_of_run
SELECT i.id, r.run_id, i.call, CAST(i.data AS BLOB), i.event_id
FROM perdure_runs AS r JOIN perdure_inbox AS i ON i.run = r.id WHERE r.run_id = ? ORDER BY i.id

-- name: unread_of_run
SELECT id, call, event_id, CAST(data AS BLOB) FROM perdure_inbox WHERE run = ? ORDER BY id

-- name: remember_signal
-- If the run has had a signal with this key on this topic before, nothing changes.
INSERT OR IGNORE INTO perdure_signals (run, topic, key) VALUES (?, ?, ?)

-- == What follows from events ========================================================================================

-- name: keep_append
RELEASE perdure_append

-- name: undo_append
ROLLBACK TO perdure_append

-- name: insert_approval
-- If the id is taken, nothing changes.
INSERT OR IGNORE INTO perdure_approvals (approval, run, seq, call, action, asked_at, deciders, expires_at)
VALUES (:approval, :run, :seq, :call, :action, :asked_at, :deciders, :expires_at)

-- name: approval_by_id
-- The last column is the event that requested it. If that was removed, it is the checkpoint: its image holds the request.
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, CAST(e.data AS BLOB)
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
    LEFT JOIN perdure_checkpoints AS c ON c.run = a.run AND c.removed >= a.seq
    JOIN perdure_events AS e ON e.id = (a.run << 32 | ifnull(c.removed + 1, a.seq))
WHERE a.approval = ?

-- name: approval_to_change
-- Like approval_by_id, in a transaction that changes the approval. The caller has already locked the approval's run
-- with run_to_change: all code locks in that order.
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, CAST(e.data AS BLOB)
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
    LEFT JOIN perdure_checkpoints AS c ON c.run = a.run AND c.removed >= a.seq
    JOIN perdure_events AS e ON e.id = (a.run << 32 | ifnull(c.removed + 1, a.seq))
WHERE a.approval = ?

-- name: list_approvals
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, CAST(e.data AS BLOB)
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
    LEFT JOIN perdure_checkpoints AS c ON c.run = a.run AND c.removed >= a.seq
    JOIN perdure_events AS e ON e.id = (a.run << 32 | ifnull(c.removed + 1, a.seq))
WHERE a.status IN (SELECT value FROM json_each(:statuses))
    AND (:tenant IS NULL OR r.tenant = :tenant)
    AND CASE WHEN :run_id IS NULL THEN r.specimen IS NULL ELSE r.run_id = :run_id END
ORDER BY a.expires_at IS NULL, a.expires_at, a.asked_at, a.id LIMIT :limit

-- == Budgets and costs ===============================================================================================

-- name: charge_budgets
-- Count the charge in the run's budget and in all budgets above it.
WITH RECURSIVE applies (run) AS (
    SELECT ledger FROM perdure_runs WHERE id = :run
    UNION
    SELECT b.above FROM perdure_budgets AS b JOIN applies ON b.run = applies.run
)
UPDATE perdure_budgets SET
    spent_usd_micros = spent_usd_micros + :spent_usd_micros, spent_tokens = spent_tokens + :spent_tokens,
    spent_calls = spent_calls + :spent_calls, spent_busy_us = spent_busy_us + :spent_busy_us,
    reserved_usd_micros = reserved_usd_micros + :reserved_usd_micros, reserved_tokens = reserved_tokens + :reserved_tokens,
    reserved_calls = reserved_calls + :reserved_calls, reserved_busy_us = reserved_busy_us + :reserved_busy_us
WHERE run IN (SELECT run FROM applies)

-- name: reserve
INSERT INTO perdure_reserved (run, usd_micros, tokens, calls, busy_us) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (run) DO UPDATE SET usd_micros = usd_micros + excluded.usd_micros, tokens = tokens + excluded.tokens,
    calls = calls + excluded.calls, busy_us = busy_us + excluded.busy_us

-- name: over_budget
-- The runs under this budget that have stopped because of a budget, each with its last budget_exceeded event.
-- CROSS JOIN fixes the order of the join: from budgets to runs.
WITH RECURSIVE below (run) AS (
    SELECT id FROM perdure_runs WHERE run_id = ?
    UNION
    SELECT b.run FROM perdure_budgets AS b JOIN below ON b.above = below.run
)
SELECT r.run_id, (
    SELECT CAST(e.data AS BLOB) FROM perdure_events AS e
    WHERE e.id > r.id << 32 AND e.id <= (r.id << 32 | 4294967295) AND e.type = 'budget_exceeded' ORDER BY e.id DESC LIMIT 1)
FROM below CROSS JOIN perdure_runs AS r ON r.ledger = below.run
WHERE r.status = 'needs_attention' AND r.attention = 'budget'
ORDER BY r.id

-- name: attempts_told
-- The events that begin, end and settle attempts, and that begin, release and end runs: run by run and in
-- order, after the position (:run, :seq).
-- CROSS JOIN fixes the order of the join: from runs to events, so that nothing has to be sorted.
SELECT r.id, e.seq, r.run_id, r.agent, r.tenant, e.call, e.type, e.ts, CAST(e.data AS BLOB)
FROM perdure_runs AS r CROSS JOIN perdure_events AS e ON e.id > (r.id << 32 | iif(r.id = :run, :seq, 0)) AND e.id <= (r.id << 32 | 4294967295)
WHERE r.id >= :run AND r.updated_at >= :since AND r.specimen IS NULL AND (:tenant IS NULL OR r.tenant = :tenant)
    AND (e.type IN ('tool_call_initiated', 'tool_call_completed', 'tool_call_failed', 'tool_call_in_doubt',
        'tool_call_resolved', 'model_call_initiated', 'model_call_completed', 'model_call_failed', 'run_cancelled',
        'run_created', 'run_claimed', 'run_released', 'run_reopened', 'run_forked', 'run_succeeded', 'run_failed')
    -- The checkpoint holds what the attempts before it have used, if their events were removed.
    OR e.type = 'checkpoint_taken' AND e.seq = (SELECT c.removed + 1 FROM perdure_checkpoints AS c WHERE c.run = r.id AND c.removed > 0))
ORDER BY r.id, e.id LIMIT :limit

-- name: attempts_told_of_runs
-- Like attempts_told, for these runs.
SELECT r.id, e.seq, r.run_id, r.agent, r.tenant, e.call, e.type, e.ts, CAST(e.data AS BLOB)
FROM json_each(:runs) AS j CROSS JOIN perdure_runs AS r ON r.id = j.value
CROSS JOIN perdure_events AS e ON e.id > (r.id << 32 | iif(r.id = :run, :seq, 0)) AND e.id <= (r.id << 32 | 4294967295)
WHERE j.value >= :run AND r.specimen IS NULL
    AND (e.type IN ('tool_call_initiated', 'tool_call_completed', 'tool_call_failed', 'tool_call_in_doubt', 'tool_call_resolved',
        'model_call_initiated', 'model_call_completed', 'model_call_failed', 'run_cancelled', 'run_forked')
    OR e.type = 'checkpoint_taken'
        AND e.seq = (SELECT c.removed + 1 FROM perdure_checkpoints AS c WHERE c.run = r.id AND c.removed > 0))
ORDER BY r.id, e.id LIMIT :limit

-- == Notices =========================================================================================================

-- name: notices_to_take
-- Like due_notices, inside the transaction that takes the notices.
SELECT id, run, seq, attempts FROM perdure_notices WHERE next_at <= ? ORDER BY next_at, id LIMIT ?

-- name: event_of_notice
SELECT r.run_id, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, CAST(e.data AS BLOB)
FROM perdure_runs AS r JOIN perdure_events AS e ON r.id = ? AND e.id = (r.id << 32 | ?)

-- == Workers, lines and claims =======================================================================================

-- name: insert_line
-- If another transaction has inserted the same line, nothing changes.
INSERT OR IGNORE INTO perdure_lines (agent, version, queue, tenant, priority) VALUES (?, ?, ?, ?, ?)

-- name: lines_with_ready_runs
-- The served lines whose first run is ready; each line with the ready_at of that run, and with the tenant's last turn.
-- CROSS JOIN fixes the order of the join: from the served agents to their lines.
SELECT l.id, l.queue, l.tenant, l.priority,
    (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at <= :now ORDER BY ready_at LIMIT 1) AS ready_at,
    ifnull((SELECT turn FROM perdure_turns AS t WHERE t.queue = l.queue AND t.tenant = l.tenant), 0)
FROM json_each(:served) AS s CROSS JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
WHERE (:queues IS NULL OR l.queue IN (SELECT value FROM json_each(:queues)))
    AND EXISTS (SELECT 1 FROM perdure_runs WHERE line = l.id AND ready_at <= :now)

-- name: ready_below
-- The ready runs below a run (see family_of_run). If :suspects is false, suspects are left out.
SELECT {run}, {ended}
FROM perdure_runs
WHERE run_id > :run_id || '/' AND run_id < :run_id || '0' AND ready_at <= :now AND :queues IS NULL
    AND (:suspects OR crashes + (lost > 0) < 2)
    AND EXISTS (SELECT 1 FROM json_each(:served) AS s WHERE s.value ->> 0 = agent AND s.value ->> 1 = version)
ORDER BY ready_at, id LIMIT :limit

-- name: ready_of_line
-- The ready runs of a line, after the position (:after_ready, :after_id); the run that has been ready longest is
-- first. If :suspects is false, suspects are left out.
SELECT {run}, {ended}
FROM perdure_runs
WHERE line = :line AND ready_at <= :now AND (ready_at, id) > (:after_ready, :after_id)
    AND (:suspects OR crashes + (lost > 0) < 2)
ORDER BY ready_at, id LIMIT :limit

-- name: held_by_party
-- How many runs are held, per queue and tenant. This reads only the index of held runs, and the lines.
SELECT l.queue, l.tenant, sum(h.held)
FROM (SELECT line, count(*) AS held FROM perdure_runs WHERE holder IS NOT NULL GROUP BY line) AS h
    CROSS JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: ready_by_party
-- How many runs are ready, per queue and tenant; and the ready_at of the run that has been ready longest.
SELECT l.queue, l.tenant, sum(h.ready), min(h.since)
FROM (SELECT line, count(*) AS ready, min(ready_at) AS since FROM perdure_runs WHERE ready_at <= :now GROUP BY line) AS h
    CROSS JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: newest_turn
SELECT ifnull(max(turn), 0) FROM perdure_turns

-- name: had_turn
INSERT INTO perdure_turns (queue, tenant, turn) VALUES (?, ?, ?) ON CONFLICT (queue, tenant) DO UPDATE SET turn = excluded.turn

-- name: claim_run
-- The epoch becomes higher: from now on, appends of the earlier holder are refused.
UPDATE perdure_runs SET epoch = :epoch, nonce = :nonce, holder = :worker, seq = :seq, head = :head, crashes = :crashes, lost_with = :lost_with,
    lost = 0, ready_at = NULL, waiting_for = NULL, error = NULL, attention = NULL, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'running'), version = ifnull(:version, version), line = ifnull(:line, line)
WHERE id = :id

-- name: next_ready
-- The earliest ready_at of all served lines, in the past or in the future.
SELECT min((SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1))
FROM json_each(:served) AS s CROSS JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
WHERE :queues IS NULL OR l.queue IN (SELECT value FROM json_each(:queues))

-- name: next_schedules
-- The schedules of served agents, the next due one first. A tick that waits for the end of a run is not due.
SELECT s.schedule_id, s.agent, s.queue, s.due_at, s.waits_for, CAST(s.state AS BLOB), s.seq, s.head
FROM perdure_schedules AS s LEFT JOIN perdure_runs AS r ON r.run_id = s.waits_for
WHERE s.due_at IS NOT NULL AND (r.status IS NULL OR r.status IN ('succeeded', 'failed', 'cancelled'))
    AND s.agent IN (SELECT value ->> 0 FROM json_each(:served)) AND (:queues IS NULL OR s.queue IN (SELECT value FROM json_each(:queues)))
ORDER BY s.due_at, s.id LIMIT :limit

-- name: all_schedules
SELECT schedule_id, agent, queue, due_at, waits_for, CAST(state AS BLOB), seq, head FROM perdure_schedules
WHERE :schedule_id IS NULL OR schedule_id = :schedule_id ORDER BY schedule_id

-- name: stored_schedule_events
SELECT e.seq, e.event_id, e.ts, 0, NULL, NULL, CASE typeof(e.data) WHEN 'text' THEN CAST(e.data AS BLOB) END, e.hash
FROM perdure_schedule_events AS e JOIN perdure_schedules AS s ON s.id = e.schedule
WHERE s.schedule_id = :schedule_id AND e.seq > :after ORDER BY e.seq LIMIT :limit

-- name: parents_to_replay
-- Start at ready children in lines that are not served, and go up to the first ancestor whose agent is served. A
-- replay of that ancestor finds the agent of the run right below that ancestor.
WITH RECURSIVE served (agent, version) AS (SELECT value ->> 0, value ->> 1 FROM json_each(:served)),
below (agent, version, parent) AS (
    SELECT l.agent, l.version, c.parent
    FROM perdure_lines AS l CROSS JOIN perdure_runs AS c ON c.line = l.id AND c.ready_at <= :now AND c.parent IS NOT NULL
    WHERE (l.agent, l.version) NOT IN served
    UNION
    SELECT p.agent, p.version, p.parent FROM below CROSS JOIN perdure_runs AS p ON p.run_id = below.parent
    WHERE p.parent IS NOT NULL AND (p.agent, p.version) NOT IN served
)
SELECT p.agent, p.version, below.agent, below.version, min(p.run_id)
FROM below CROSS JOIN perdure_runs AS p ON p.run_id = below.parent
WHERE (p.agent, p.version) IN served AND p.run_id NOT IN (SELECT value FROM json_each(:but))
GROUP BY 1, 2, 3, 4

-- name: insert_worker
-- If the worker already has a row, update what the worker serves.
INSERT INTO perdure_workers (worker, name, pid, started_at, beat_at, serves, queues, lease_us)
VALUES (:worker, :name, :pid, :now, :now, :served, :queues, :lease_us)
ON CONFLICT (worker) DO UPDATE SET name = excluded.name, pid = excluded.pid, beat_at = excluded.beat_at, serves = excluded.serves,
    queues = excluded.queues, started_at = iif(pid = excluded.pid, started_at, excluded.started_at)

-- name: beat
-- The new value must differ from the last value, or other workers would not see the heartbeat. It may be lower, if a
-- clock was set back.
UPDATE perdure_workers SET beat_at = iif(beat_at = :now, :now + 1, :now) WHERE worker = :worker

-- name: list_workers
-- The last column: how long ago was the last heartbeat?
SELECT worker, name, pid, started_at, beat_at, (SELECT count(*) FROM perdure_runs WHERE holder = worker), serves, queues, lease_us,
    :now - beat_at
FROM perdure_workers ORDER BY started_at, worker

-- name: holders_without_worker
SELECT DISTINCT holder FROM perdure_runs
WHERE holder IS NOT NULL AND holder NOT IN (SELECT worker FROM perdure_workers)

-- name: lose_runs
-- The holder is gone, so its runs become claimable at once. `lost` tells the next claim that it is a takeover, and
-- `lost_with` tells how many other runs may be to blame.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued'), lost_with = iif(crashes >= 2, :beside_suspects, :beside)
WHERE holder = :worker

-- name: lose_run
-- Like lose_runs, for one run. If the run was claimed again, it has another epoch, and nothing changes.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued'), lost_with = iif(crashes >= 2, :beside_suspects, :beside)
WHERE run_id = :run_id AND holder = :worker AND epoch = :epoch

-- name: lose_runs_of_silent_worker
-- Like lose_runs. If the worker has sent another heartbeat since :beat_at, nothing changes.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued'), lost_with = iif(crashes >= 2, :beside_suspects, :beside)
WHERE holder = :worker AND EXISTS (SELECT 1 FROM perdure_workers AS w WHERE w.worker = :worker AND w.beat_at = :beat_at)

-- == The progress of attempts ========================================================================================

-- name: progress_of_runs
SELECT r.run_id, p.call, p.attempt, p.progress, p.at
FROM json_each(:run_ids) AS j CROSS JOIN perdure_runs AS r ON r.run_id = j.value CROSS JOIN perdure_progress AS p ON p.run = r.id
ORDER BY r.id, p.call

-- == Rate limits =====================================================================================================

-- name: make_rate
-- Make sure that the rate has a row, which can then be changed.
INSERT OR IGNORE INTO perdure_rates (key, due, paused_until, seen_at) VALUES (?, 0, 0, 0)

-- name: rate_to_change
SELECT due, paused_until, seen_at FROM perdure_rates WHERE key = ?

-- name: hold_rate_back
INSERT INTO perdure_rates (key, due, paused_until, seen_at) VALUES (:key, 0, :until, 0)
ON CONFLICT (key) DO UPDATE SET paused_until = max(paused_until, excluded.paused_until)

-- == Repairing =======================================================================================================

-- name: guards_of_settled_rows
-- The triggers that refuse changes of rows which a repair has to change. The repair drops them and creates them again
-- in one transaction.
SELECT name, sql FROM sqlite_schema
WHERE type = 'trigger' AND name IN ('perdure_runs_finished', 'perdure_runs_identity', 'perdure_approvals_settled')

-- name: drop_guard_of_ends
DROP TRIGGER IF EXISTS perdure_runs_finished

-- name: drop_guard_of_identity
DROP TRIGGER IF EXISTS perdure_runs_identity

-- name: drop_guard_of_decisions
DROP TRIGGER IF EXISTS perdure_approvals_settled

-- == Moving, pruning =================================================================================================

-- name: lock_journal
-- No effect: on SQLite only one transaction writes at a time.
SELECT 1

-- name: lock_workers
SELECT 1

-- name: other_tables
SELECT name FROM sqlite_schema WHERE type = 'table' AND substr(name, 1, 8) <> 'perdure_' AND substr(name, 1, 7) <> 'sqlite_' ORDER BY name

-- name: roots
-- The runs without a parent, in the order of their keys.
SELECT id, run_id FROM perdure_runs WHERE id > :after AND instr(run_id, '/') = 0 ORDER BY id LIMIT :limit

-- name: families
-- All runs of these families (see family_of_run). CROSS JOIN fixes the order of the join: from the roots to the runs.
SELECT root.value, r.run_id, r.id, r.seq, r.head, r.status, r.updated_at
FROM json_each(:roots) AS root CROSS JOIN perdure_runs AS r ON r.run_id = root.value
UNION ALL
SELECT root.value, r.run_id, r.id, r.seq, r.head, r.status, r.updated_at
FROM json_each(:roots) AS root CROSS JOIN perdure_runs AS r ON r.run_id > root.value || '/' AND r.run_id < root.value || '0'
ORDER BY 3

-- name: heads
SELECT r.run_id, r.seq, r.head FROM json_each(:run_ids) AS j CROSS JOIN perdure_runs AS r ON r.run_id = j.value

-- name: pruned_heads
SELECT run_id, events, head FROM perdure_pruned WHERE run_id IN (SELECT value FROM json_each(:run_ids)) AND status <> 'returned'

-- name: whole_runs
-- All columns that are also valid in another database: no keys and no holder. The last column is the id of the run
-- whose budget applies first.
SELECT r.id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes,
    error, created_at, updated_at, priority, attention, r.parent, parent_call, parent_seq, depth, lost_with, specimen,
    (SELECT l.run_id FROM perdure_runs AS l WHERE l.id = r.ledger)
FROM json_each(:run_ids) AS j CROSS JOIN perdure_runs AS r ON r.run_id = j.value ORDER BY r.id

-- name: whole_events
SELECT e.id >> 32, e.id & 4294967295, e.event_id, e.ts, e.epoch, e.call, e.cause, CAST(e.data AS BLOB), e.hash
FROM json_each(:runs) AS j CROSS JOIN perdure_events AS e ON e.id > j.value << 32 AND e.id <= (j.value << 32 | 4294967295) ORDER BY e.id

-- name: whole_approvals
SELECT run, approval, seq, call, action, asked_at, status, deciders, expires_at, escalated, voters, digest, settled_by, note, settled_at
FROM perdure_approvals WHERE run IN (SELECT value FROM json_each(:runs)) ORDER BY id

-- name: whole_signals
SELECT run, topic, key FROM perdure_signals WHERE run IN (SELECT value FROM json_each(:runs)) ORDER BY run, topic, key

-- name: whole_budgets
-- The first column is the run that has the budget. The second column is the run that has the next budget above.
SELECT b.run, (SELECT r.run_id FROM perdure_runs AS r WHERE r.id = b.above), limit_usd_micros, limit_tokens, limit_calls, limit_busy_us,
    on_exceed, spent_usd_micros, spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us
FROM perdure_budgets AS b WHERE b.run IN (SELECT value FROM json_each(:runs))

-- name: whole_reserved
SELECT run, usd_micros, tokens, calls, busy_us FROM perdure_reserved WHERE run IN (SELECT value FROM json_each(:runs))

-- name: whole_inbox
SELECT run, call, event_id, ts, CAST(data AS BLOB) FROM perdure_inbox WHERE run IN (SELECT value FROM json_each(:runs)) ORDER BY id

-- name: whole_notices
SELECT run, seq, next_at, attempts, error FROM perdure_notices WHERE run IN (SELECT value FROM json_each(:runs)) ORDER BY id

-- name: whole_blob_uses
SELECT run, digest FROM perdure_blob_uses WHERE run IN (SELECT value FROM json_each(:runs)) ORDER BY run, digest

-- name: take_in_run
-- Insert a run from another journal, with its ready_at. No row is returned if the id is taken.
INSERT INTO perdure_runs (id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes, error,
    created_at, updated_at, priority, attention, parent, parent_call, parent_seq, depth, lost_with, specimen, line, ledger)
VALUES ((SELECT max(ifnull((SELECT max(id) FROM perdure_runs), 0), ifnull((SELECT max(number) FROM perdure_pruned), 0)) + 1), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT ledger FROM perdure_runs WHERE run_id = ?))
ON CONFLICT (run_id) DO NOTHING RETURNING id

-- name: take_in_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed, spent_usd_micros,
    spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us)
VALUES (?, (SELECT id FROM perdure_runs WHERE run_id = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: use_blob
INSERT OR IGNORE INTO perdure_blob_uses (run, digest) VALUES (?, ?)

-- name: known_blobs
SELECT digest FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))

-- name: run_to_keep
-- No lock is needed against a prune: on SQLite only one transaction writes at a time.
SELECT id FROM perdure_runs WHERE run_id = ?

-- name: prunable
-- The families that ended before :before, whose root has one of :statuses, and which have no notice left to send; each
-- family with the number of its runs and events.
SELECT r.id, r.run_id,
    1 + (SELECT count(*) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'),
    (r.seq + (SELECT ifnull(sum(k.seq), 0) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'))
FROM perdure_runs AS r
WHERE r.id > :after AND instr(r.run_id, '/') = 0 AND r.specimen IS NULL AND r.status IN (SELECT value FROM json_each(:statuses)) AND r.updated_at < :before
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'
            AND (k.status NOT IN ('succeeded', 'failed', 'cancelled') OR k.updated_at >= :before))
    AND NOT EXISTS (SELECT 1 FROM perdure_notices AS n WHERE n.run = r.id)
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k JOIN perdure_notices AS n ON n.run = k.id
        WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0')
ORDER BY r.id LIMIT :limit

-- name: runs_to_prune
-- No lock is needed: on SQLite only one transaction writes at a time.
SELECT id FROM perdure_runs WHERE id IN (SELECT value FROM json_each(:runs)) ORDER BY id

-- name: unsent_notices
-- The runs that have notices left to send.
SELECT DISTINCT run FROM perdure_notices WHERE run IN (SELECT value FROM json_each(:runs))

-- name: bury
INSERT INTO perdure_pruned (number, run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by)
SELECT id, run_id, agent, tenant, ifnull(:status, status), seq, head, created_at, updated_at, :now, :by
FROM perdure_runs WHERE id IN (SELECT value FROM json_each(:runs))

-- name: prune_notices
DELETE FROM perdure_notices WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_inbox
DELETE FROM perdure_inbox WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_signals
DELETE FROM perdure_signals WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_reserved
DELETE FROM perdure_reserved WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_progress
DELETE FROM perdure_progress WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_approvals
DELETE FROM perdure_approvals WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_budgets
DELETE FROM perdure_budgets WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_blob_uses
DELETE FROM perdure_blob_uses WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_events
DELETE FROM perdure_events WHERE id IN (
    SELECT inside.id FROM json_each(:runs) AS j CROSS JOIN perdure_events AS inside
    ON inside.id > j.value << 32 AND inside.id <= (j.value << 32 | 4294967295))

-- name: prune_checkpoints
DELETE FROM perdure_checkpoints WHERE run IN (SELECT value FROM json_each(:runs))

-- name: whole_checkpoints
SELECT run, seq, removed, head, by, at FROM perdure_checkpoints WHERE run IN (SELECT value FROM json_each(:runs))

-- name: prune_labels
DELETE FROM perdure_labels WHERE run IN (SELECT value FROM json_each(:runs))

-- name: whole_labels
SELECT run, key, value FROM perdure_labels WHERE run IN (SELECT value FROM json_each(:runs)) ORDER BY run, key

-- name: labels_of_runs
SELECT r.run_id, l.key, l.value FROM json_each(:run_ids) AS j CROSS JOIN perdure_runs AS r ON r.run_id = j.value
JOIN perdure_labels AS l ON l.run = r.id ORDER BY l.run, l.key

-- name: hash_of_event
SELECT hash FROM perdure_events WHERE id = (? << 32 | ?)

-- name: prune_events_before
DELETE FROM perdure_events WHERE id BETWEEN (:run << 32 | 2) AND (:run << 32 | :removed)

-- name: events_left
SELECT CAST(data AS BLOB) FROM perdure_events WHERE id = (:run << 32 | 1) OR id BETWEEN (:run << 32 | :removed + 1) AND (:run << 32 | 4294967295)

-- name: prune_some_blob_uses
DELETE FROM perdure_blob_uses WHERE run = :run AND digest IN (SELECT unhex(value) FROM json_each(:digests))

-- name: prune_runs
DELETE FROM perdure_runs WHERE id IN (SELECT value FROM json_each(:runs))

-- name: blobs_to_prune
-- Those of the digests whose blobs exist. No lock is needed: on SQLite only one transaction writes at a time.
SELECT digest FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))

-- name: prune_blobs
DELETE FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))
    AND NOT EXISTS (SELECT 1 FROM perdure_blob_uses AS u WHERE u.digest = perdure_blobs.digest)

-- == Artifacts ========================================================================================================

-- name: artifact_to_change
SELECT id, state FROM perdure_artifacts WHERE artifact = ?

-- name: artifacts_to_use
-- The artifacts of this tenant that a new run, or a signal, names.
SELECT id, artifact FROM perdure_artifacts WHERE artifact IN (SELECT value FROM json_each(:artifacts)) AND tenant = :tenant AND state = 'saved'

-- name: whole_artifact_uses
-- The saved artifacts that these families use, by the key of their root.
SELECT u.run, a.artifact FROM perdure_artifact_uses AS u JOIN perdure_artifacts AS a ON a.id = u.artifact
WHERE u.run IN (SELECT value FROM json_each(:runs)) AND a.state = 'saved' ORDER BY u.run, u.artifact

-- name: used_artifacts
SELECT DISTINCT artifact FROM perdure_artifact_uses WHERE run IN (SELECT value FROM json_each(:runs)) ORDER BY artifact

-- name: prune_artifact_uses
DELETE FROM perdure_artifact_uses WHERE run IN (SELECT value FROM json_each(:runs))

-- name: lock_artifacts
-- No lock is needed: on SQLite only one transaction writes at a time.
SELECT id FROM perdure_artifacts WHERE id IN (SELECT value FROM json_each(:artifacts))

-- name: artifacts_to_prune
SELECT id FROM perdure_artifacts WHERE id IN (SELECT value FROM json_each(:artifacts))
    AND NOT EXISTS (SELECT 1 FROM perdure_artifact_uses AS u WHERE u.artifact = perdure_artifacts.id) ORDER BY id

-- == Opening =========================================================================================================

-- name: has_schema_table
SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'perdure_schema'

-- name: applied_migrations
SELECT version, checksum FROM perdure_schema ORDER BY version

-- name: record_migration
INSERT INTO perdure_schema (version, checksum, applied_at) VALUES (?, ?, CAST(unixepoch('subsec') * 1000000 AS INTEGER))

-- name: specimens_among
SELECT run_id FROM perdure_runs WHERE id IN (SELECT value FROM json_each(:runs)) AND specimen IS NOT NULL
