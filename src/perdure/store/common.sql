-- The statements that are the same in every dialect. The code calls each statement by the name above it.
-- Values are passed as parameters only; no statement is ever assembled from data.
-- {run} stands for the columns of a run, in the order of the fields of RunRow, and then the key of the run.
-- {ended} stands for the expression with the name `ended` of the dialect.

-- == Repairing =======================================================================================================

-- name: repair_run
-- Write the row of a run as its journal has it.
UPDATE perdure_runs SET agent = :agent, version = :version, tenant = :tenant, actor = :actor, queue = :queue, target = :target,
    input_digest = :input_digest, status = :status, waiting_for = :waiting_for, ready_at = :ready_at, seq = :seq, head = :head, epoch = :epoch,
    holder = :holder, nonce = NULL, lost = :lost, crashes = :crashes, error = :error, created_at = :created_at, updated_at = :updated_at,
    priority = :priority, attention = :attention, parent = :parent, parent_call = :parent_call, line = :line
WHERE id = :id

-- name: repair_approval
INSERT INTO perdure_approvals (run, approval, seq, call, action, asked_at, status, deciders, expires_at, escalated, voters, digest, settled_by,
    note, settled_at)
VALUES (:run, :approval, :seq, :call, :action, :asked_at, :status, :deciders, :expires_at, :escalated, :voters, :digest, :settled_by, :note,
    :settled_at)
ON CONFLICT (approval) DO UPDATE SET run = excluded.run, seq = excluded.seq, call = excluded.call, action = excluded.action,
    asked_at = excluded.asked_at, status = excluded.status, deciders = excluded.deciders, expires_at = excluded.expires_at,
    escalated = excluded.escalated, voters = excluded.voters, digest = excluded.digest, settled_by = excluded.settled_by,
    note = excluded.note, settled_at = excluded.settled_at

-- name: repair_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed, spent_usd_micros,
    spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us)
VALUES (:run, (SELECT ledger FROM perdure_runs WHERE run_id = :parent), :limit_usd_micros, :limit_tokens, :limit_calls, :limit_busy_us, :on_exceed,
    :spent_usd_micros, :spent_tokens, :spent_calls, :spent_busy_us, :reserved_usd_micros, :reserved_tokens, :reserved_calls, :reserved_busy_us)
ON CONFLICT (run) DO UPDATE SET limit_usd_micros = excluded.limit_usd_micros, limit_tokens = excluded.limit_tokens,
    limit_calls = excluded.limit_calls, limit_busy_us = excluded.limit_busy_us, on_exceed = excluded.on_exceed,
    spent_usd_micros = excluded.spent_usd_micros, spent_tokens = excluded.spent_tokens, spent_calls = excluded.spent_calls,
    spent_busy_us = excluded.spent_busy_us, reserved_usd_micros = excluded.reserved_usd_micros, reserved_tokens = excluded.reserved_tokens,
    reserved_calls = excluded.reserved_calls, reserved_busy_us = excluded.reserved_busy_us

-- == The append path =================================================================================================

-- name: consume_inbox
-- Delete an inbox row that the events of this commit record.
DELETE FROM perdure_inbox WHERE id = ? AND run = ?

-- name: guard_of_run
-- The columns of the guard, to explain in words why an append was refused.
SELECT status, seq, epoch, holder, nonce FROM perdure_runs WHERE id = ?

-- name: run_key
SELECT id FROM perdure_runs WHERE run_id = ?

-- == Reading =========================================================================================================

-- name: run_by_id
SELECT {run}
FROM perdure_runs WHERE run_id = ?

-- name: blob
SELECT data FROM perdure_blobs WHERE digest = ?

-- == Creating and posting ============================================================================================

-- name: insert_inbox
INSERT INTO perdure_inbox (run, call, event_id, ts, data) VALUES (:id, :call, :event_id, :now, :data)

-- name: inbox_event_of_run
-- Is a posted event in the inbox? The code asks after a COMMIT with unknown outcome.
SELECT 1 FROM perdure_inbox WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND event_id = :event_id

-- == What follows from events ========================================================================================

-- name: begin_append
-- Several appends share one transaction. If a consequence of one append is refused, only that append is undone.
SAVEPOINT perdure_append

-- name: relations_of_run
SELECT run_id, tenant, actor, queue, priority, depth, parent, parent_call, parent_seq, ledger IS NOT NULL,
    EXISTS (SELECT 1 FROM perdure_approvals AS a WHERE a.run = r.id AND a.status = 'pending')
FROM perdure_runs AS r WHERE id = ?

-- name: consume_approval
-- The approval must be for this very call with these very arguments, and be approved, not consumed and not expired.
-- Otherwise nothing changes.
UPDATE perdure_approvals SET status = 'consumed'
WHERE approval = :approval AND run = :run AND call = :call AND action = :tool AND digest = :digest AND status = 'approved'
    AND (expires_at IS NULL OR expires_at > :ts)

-- name: withdraw_approvals
-- The run has ended: its pending approvals are not needed any more.
UPDATE perdure_approvals SET status = 'withdrawn', settled_at = :ts WHERE run = :run AND status = 'pending'

-- name: withdraw_approval_of_call
-- The run was reopened, and its agent no longer waits for this approval.
UPDATE perdure_approvals SET status = 'withdrawn', settled_by = NULL, note = NULL, settled_at = :ts
WHERE run = :run AND call = :call AND status IN ('pending', 'approved')

-- name: change_approval
UPDATE perdure_approvals SET status = :status, deciders = :deciders, expires_at = :expires_at, escalated = :escalated, voters = :voters,
    digest = :digest, settled_by = :settled_by, note = :note, settled_at = :settled_at
WHERE id = :id

-- == Budgets and costs ===============================================================================================

-- name: insert_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed)
VALUES (:run, :above, :usd_micros, :tokens, :calls, :busy_us, :on_exceed)

-- name: own_ledger
UPDATE perdure_runs SET ledger = id WHERE id = ?

-- name: free_reserved
DELETE FROM perdure_reserved WHERE run = ? RETURNING usd_micros, tokens, calls, busy_us

-- name: reserved_by_run
SELECT usd_micros, tokens, calls, busy_us FROM perdure_reserved WHERE run = (SELECT id FROM perdure_runs WHERE run_id = ?)

-- name: raise_budget
-- NULL plus a number is NULL: an amount without a limit stays without a limit.
UPDATE perdure_budgets SET limit_usd_micros = limit_usd_micros + :usd_micros, limit_tokens = limit_tokens + :tokens,
    limit_calls = limit_calls + :calls, limit_busy_us = limit_busy_us + :busy_us
WHERE run = :run

-- name: ledgers_of_run
WITH RECURSIVE applies (run, distance) AS (
    SELECT ledger, 0 FROM perdure_runs WHERE run_id = ?
    UNION
    SELECT b.above, applies.distance + 1 FROM perdure_budgets AS b JOIN applies ON b.run = applies.run
)
SELECT r.run_id, b.limit_usd_micros, b.limit_tokens, b.limit_calls, b.limit_busy_us, b.on_exceed,
    b.spent_usd_micros, b.spent_tokens, b.spent_calls, b.spent_busy_us,
    b.reserved_usd_micros, b.reserved_tokens, b.reserved_calls, b.reserved_busy_us
FROM applies JOIN perdure_budgets AS b ON b.run = applies.run JOIN perdure_runs AS r ON r.id = b.run ORDER BY applies.distance

-- == Notices =========================================================================================================

-- name: insert_notice
INSERT INTO perdure_notices (run, seq, next_at) VALUES (?, ?, ?)

-- name: due_notices
SELECT id, run, seq, attempts FROM perdure_notices WHERE next_at <= ? ORDER BY next_at, id LIMIT ?

-- name: take_notice
-- Until next_at, the notice belongs to the process that has taken it.
UPDATE perdure_notices SET next_at = ?, attempts = attempts + 1 WHERE id = ?

-- name: notice
SELECT next_at, attempts FROM perdure_notices WHERE id = ?

-- name: delete_notice
DELETE FROM perdure_notices WHERE id = ?

-- name: put_notice_off
UPDATE perdure_notices SET next_at = ?, error = ? WHERE id = ?

-- name: failing_notices
-- How many notices have failed so far, and the error of the newest of them.
SELECT count(*), (SELECT error FROM perdure_notices WHERE error IS NOT NULL ORDER BY id DESC LIMIT 1)
FROM perdure_notices WHERE error IS NOT NULL

-- name: next_notice
SELECT min(next_at) FROM perdure_notices

-- == Workers, lines and claims =======================================================================================

-- name: line
SELECT id FROM perdure_lines WHERE agent = ? AND version = ? AND queue = ? AND tenant = ? AND priority = ?

-- name: kind_of_run
SELECT agent, queue, tenant, priority FROM perdure_runs WHERE id = ?

-- name: move_run
UPDATE perdure_runs SET version = ?, line = ? WHERE id = ?

-- name: set_aside
-- A run that has ended by its journal, and whose edited row says that it is ready: a person has to look at it.
UPDATE perdure_runs SET status = 'needs_attention', attention = 'error', error = :error, waiting_for = NULL, ready_at = NULL WHERE id = :id

-- name: suspects_of_worker
SELECT crashes, lost_with FROM perdure_runs WHERE holder = ? AND crashes >= 2

-- name: held_suspects
-- The suspects that any worker holds.
SELECT holder, crashes, lost_with FROM perdure_runs WHERE holder IS NOT NULL AND crashes >= 2

-- name: load_of_worker
-- How many runs the worker holds, and how many suspects among them.
SELECT count(*), count(*) FILTER (WHERE crashes >= 2) FROM perdure_runs WHERE holder = ?

-- name: delete_worker
DELETE FROM perdure_workers WHERE worker = ?

-- name: worker_by_id
SELECT name, beat_at FROM perdure_workers WHERE worker = ?

-- name: held_by_worker
SELECT run_id, epoch FROM perdure_runs WHERE holder = ?

-- == Rate limits =====================================================================================================

-- name: rate
SELECT due, paused_until, seen_at FROM perdure_rates WHERE key = ?

-- name: book_rate
INSERT INTO perdure_rates (key, due, paused_until, seen_at) VALUES (:key, :due, :paused_until, :seen_at)
ON CONFLICT (key) DO UPDATE SET due = excluded.due, paused_until = excluded.paused_until, seen_at = excluded.seen_at

-- == The progress of attempts ========================================================================================

-- name: keep_progress
-- Nothing changes unless this worker holds the run under this epoch. On PostgreSQL a claim may commit while this
-- statement runs. Then this row is about the attempt before that claim; it never replaces a later attempt's progress.
INSERT INTO perdure_progress (run, call, attempt, progress, at)
SELECT id, CAST(? AS BIGINT), CAST(? AS BIGINT), CAST(? AS TEXT), CAST(? AS BIGINT)
FROM perdure_runs WHERE run_id = ? AND holder = ? AND epoch = ?
ON CONFLICT (run, call) DO UPDATE SET attempt = excluded.attempt, progress = excluded.progress, at = excluded.at
WHERE perdure_progress.attempt <= excluded.attempt

-- name: forget_progress
-- The end of the attempt is in the journal. No guard is needed here: an event is never removed from a journal.
DELETE FROM perdure_progress WHERE run = (SELECT id FROM perdure_runs WHERE run_id = ?) AND call = ? AND attempt <= ?

-- == Schedules =======================================================================================================

-- name: insert_schedule
-- Of two workers that declare the same schedule, the second changes nothing.
INSERT INTO perdure_schedules (schedule_id, agent, queue, due_at, waits_for, state, seq, head)
VALUES (:schedule_id, :agent, :queue, :due_at, :waits_for, :state, :seq, :head) ON CONFLICT (schedule_id) DO NOTHING

-- name: advance_schedule
-- The guard: of several workers that start the same tick, one finds the seq that it has read.
UPDATE perdure_schedules SET agent = :agent, queue = :queue, due_at = :due_at, waits_for = :waits_for, state = :state, seq = :seq, head = :head
WHERE schedule_id = :schedule_id AND seq = :expected

-- name: insert_schedule_event
INSERT INTO perdure_schedule_events (schedule, seq, event_id, ts, data, hash)
VALUES ((SELECT id FROM perdure_schedules WHERE schedule_id = ?), ?, ?, ?, ?, ?)

-- name: schedule_event_hash
SELECT hash FROM perdure_schedule_events WHERE schedule = (SELECT id FROM perdure_schedules WHERE schedule_id = ?) AND seq = ?

-- name: missing_schedule_heads
-- The schedules that have lost an event: the journal-wide chain has the event, and the journal does not.
SELECT -c.run, max(c.seq), max(c.run_id), s.schedule_id, s.seq
FROM perdure_chain AS c LEFT JOIN perdure_schedules AS s ON s.id = -c.run
    LEFT JOIN perdure_schedule_events AS e ON e.schedule = -c.run AND e.seq = c.seq
WHERE c.run < 0 AND (s.id IS NULL OR s.seq < c.seq OR e.seq IS NULL OR substr(e.hash, 1, 16) <> c.head)
GROUP BY c.run, s.schedule_id, s.seq ORDER BY 1

-- name: unchained_schedules
-- The schedules whose last event is not in the journal-wide chain.
SELECT s.schedule_id, s.seq FROM perdure_schedules AS s LEFT JOIN perdure_chain AS c ON c.run = -s.id AND c.seq = s.seq
WHERE c.n IS NULL ORDER BY s.id

-- == Moving, pruning =================================================================================================

-- name: moved
SELECT state, to_url, by, at FROM perdure_moved

-- name: close_journal
INSERT INTO perdure_moved (id, state, to_url, by, at) VALUES (1, 'moving', ?, ?, ?)

-- name: finish_move
UPDATE perdure_moved SET state = 'moved' WHERE state = 'moving'

-- name: reopen_journal
DELETE FROM perdure_moved WHERE state = 'moving'

-- name: count_held
SELECT count(*) FROM perdure_runs WHERE holder IS NOT NULL

-- name: count_runs
SELECT count(*) FROM perdure_runs

-- name: take_in_approval
INSERT INTO perdure_approvals (run, approval, seq, call, action, asked_at, status, deciders, expires_at, escalated, voters, digest, settled_by,
    note, settled_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: take_in_inbox
INSERT INTO perdure_inbox (run, call, event_id, ts, data) VALUES (?, ?, ?, ?, ?)

-- name: take_in_notice
INSERT INTO perdure_notices (run, seq, next_at, attempts, error) VALUES (?, ?, ?, ?, ?)

-- name: rates
SELECT key, due, paused_until, seen_at FROM perdure_rates

-- name: tombstone
-- The newest tombstone of the run. A tombstone "returned" does not count: it is the trace of a copy that was deleted
-- when a move was undone.
SELECT id, run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by FROM perdure_pruned WHERE run_id = ? AND status <> 'returned' ORDER BY id DESC LIMIT 1

-- name: tombstones
SELECT id, run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by FROM perdure_pruned WHERE id > :after ORDER BY id LIMIT :limit

-- name: take_in_tombstone
INSERT INTO perdure_pruned (run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: count_pruned
SELECT count(*), max(pruned_at) FROM perdure_pruned WHERE status <> 'returned'

-- == Artifacts ========================================================================================================

-- name: run_of_artifact
SELECT tenant FROM perdure_runs WHERE run_id = ?

-- name: insert_artifact
INSERT INTO perdure_artifacts (artifact, run_id, tenant, call, attempt, state, place, object, sha256, size, content_type, created_at)
VALUES (:artifact, :run_id, :tenant, :call, :attempt, 'saving', :place, :object, :digest, :size, :content_type, :created_at)

-- name: use_artifact
INSERT INTO perdure_artifact_uses (run, artifact) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: insert_chunk
INSERT INTO perdure_artifact_chunks (artifact, number, data) VALUES (?, ?, ?)

-- name: place_artifact
-- The bytes go to this place, not into this database.
UPDATE perdure_artifacts SET place = :place, object = :object WHERE artifact = :artifact AND state = 'saving'

-- name: finish_artifact
UPDATE perdure_artifacts SET state = 'saved', sha256 = :digest, size = :size WHERE artifact = :artifact AND state = 'saving'

-- name: keep_artifact
-- Mark an artifact of a copied journal as saved: its bytes are here, and now its run is inserted too.
UPDATE perdure_artifacts SET state = 'saved' WHERE id = ? AND state = 'saving' AND sha256 IS NOT NULL

-- name: artifact
SELECT artifact, run_id, tenant, call, attempt, state, place, object, sha256, size, content_type, created_at
FROM perdure_artifacts WHERE artifact = ?

-- name: artifact_chunk
SELECT c.data FROM perdure_artifacts AS a JOIN perdure_artifact_chunks AS c ON c.artifact = a.id WHERE a.artifact = ? AND c.number = ?

-- name: artifact_use
-- May this family, named by its root, open the artifact?
SELECT 1 FROM perdure_artifacts AS a JOIN perdure_artifact_uses AS u ON u.artifact = a.id JOIN perdure_runs AS r ON r.id = u.run
WHERE a.artifact = ? AND r.run_id = ?

-- name: artifacts_of_run
SELECT artifact, run_id, tenant, call, attempt, state, place, object, sha256, size, content_type, created_at
FROM perdure_artifacts WHERE run_id = ? ORDER BY id

-- name: artifact_runs
-- The runs that have saved artifacts, in order of their ids, page by page.
SELECT DISTINCT run_id FROM perdure_artifacts WHERE run_id > :after AND state <> 'deleting' ORDER BY run_id LIMIT :limit

-- name: outside_artifacts
SELECT artifact, run_id, tenant, call, attempt, state, place, object, sha256, size, content_type, created_at
FROM perdure_artifacts WHERE artifact > :after AND place IS NOT NULL AND state = 'saved' ORDER BY artifact LIMIT :limit

-- name: artifact_families
SELECT r.run_id FROM perdure_artifacts AS a JOIN perdure_artifact_uses AS u ON u.artifact = a.id JOIN perdure_runs AS r ON r.id = u.run
WHERE a.artifact = ? ORDER BY r.run_id

-- name: doomed_artifacts
SELECT artifact, run_id, tenant, call, attempt, state, place, object, sha256, size, content_type, created_at
FROM perdure_artifacts WHERE state = 'deleting' ORDER BY id LIMIT ?

-- name: doom_artifact
UPDATE perdure_artifacts SET state = 'deleting' WHERE id = ? AND state <> 'deleting'

-- name: other_artifact_use
-- Is there a family that uses the artifact and has not saved it? The id of every run begins with the id of its root,
-- and the id of a root has no slash.
SELECT 1 FROM perdure_artifact_uses AS u JOIN perdure_artifacts AS a ON a.id = u.artifact JOIN perdure_runs AS r ON r.id = u.run
WHERE u.artifact = ? AND a.run_id <> r.run_id AND substr(a.run_id, 1, length(r.run_id) + 1) <> r.run_id || '/'

-- name: forget_artifact
DELETE FROM perdure_artifact_uses WHERE artifact = ?

-- name: delete_chunks
DELETE FROM perdure_artifact_chunks WHERE artifact = ? AND number >= ?

-- name: delete_artifact
DELETE FROM perdure_artifacts WHERE id = ? AND state <> 'saved'

-- name: count_artifacts
SELECT count(*), coalesce(sum(size), 0), coalesce(sum(CASE WHEN place IS NULL THEN size END), 0),
    coalesce(sum(CASE WHEN state = 'deleting' THEN 1 ELSE 0 END), 0)
FROM perdure_artifacts

-- == Figures ==========================================================================================================

-- name: unfinished_runs
-- How many runs are in each status, per agent and queue. Reads only the index of unfinished runs, and the lines.
SELECT l.agent, l.queue, h.status, h.attention, h.runs FROM (
    SELECT line, status, attention, count(*) AS runs FROM perdure_runs
    WHERE status <> 'succeeded' AND status <> 'failed' AND status <> 'cancelled' AND specimen IS NULL
    GROUP BY line, status, attention
) AS h JOIN perdure_lines AS l ON l.id = h.line

-- name: ready_runs
-- How many runs wait for a worker, per agent and queue; and the ready_at of the run that has been ready longest.
SELECT l.agent, l.queue, h.ready, h.since FROM (
    SELECT line, count(*) AS ready, min(ready_at) AS since FROM perdure_runs WHERE ready_at <= ? GROUP BY line
) AS h JOIN perdure_lines AS l ON l.id = h.line

-- name: held_by_workers
-- Reads only the index of held runs.
SELECT holder, count(*) FROM perdure_runs WHERE holder IS NOT NULL GROUP BY holder

-- name: pending_approvals
-- How many approvals are pending, per agent and queue; and when the oldest of them was asked for.
SELECT r.agent, r.queue, count(*), min(a.asked_at)
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
WHERE a.status = 'pending' AND r.specimen IS NULL GROUP BY r.agent, r.queue

-- == Labels ===========================================================================================================

-- name: set_label
INSERT INTO perdure_labels (run, key, value, created_at)
SELECT r.id, CAST(? AS TEXT), CAST(? AS TEXT), r.created_at FROM perdure_runs AS r WHERE r.id = ?
ON CONFLICT (run, key) DO UPDATE SET value = excluded.value

-- name: remove_label
DELETE FROM perdure_labels WHERE run = ? AND key = ?

-- name: remove_labels
DELETE FROM perdure_labels WHERE run = ?

-- == Checkpoints =======================================================================================================

-- name: set_checkpoint
INSERT INTO perdure_checkpoints (run, seq) VALUES (?, ?) ON CONFLICT (run) DO UPDATE SET seq = excluded.seq

-- name: leave_checkpoint
-- The run went back to an event before its last checkpoint: all of its journal is read, until it takes the next one.
UPDATE perdure_checkpoints SET seq = 0 WHERE run = :run AND seq > :back_to

-- name: checkpoint_of_run
SELECT c.seq, c.removed, c.head, c.by, c.at FROM perdure_checkpoints AS c JOIN perdure_runs AS r ON r.id = c.run WHERE r.run_id = ?

-- name: checkpoint_to_change
SELECT c.seq, c.removed FROM perdure_checkpoints AS c WHERE c.run = ?

-- name: needed_before_checkpoint
-- What still needs the events of this run before its last checkpoint: a notice that was not sent, or an undo of the family that has not ended.
SELECT CASE
    WHEN EXISTS (SELECT 1 FROM perdure_notices AS n WHERE n.run = c.run AND n.seq > 1 AND n.seq < c.seq) THEN 'notice'
    WHEN EXISTS (SELECT 1 FROM perdure_runs AS u WHERE u.run_id = :undo AND u.status NOT IN ('succeeded', 'failed', 'cancelled')) THEN 'undo'
END FROM perdure_checkpoints AS c WHERE c.run = :run

-- name: removed_events
-- The runs whose events before a checkpoint were removed, with the last of these events and its hash.
SELECT r.run_id, c.removed, c.head FROM perdure_checkpoints AS c JOIN perdure_runs AS r ON r.id = c.run WHERE c.removed > 0

-- name: removed_in_family
-- The runs of this family whose events before a checkpoint were removed.
SELECT r.run_id, c.removed FROM perdure_checkpoints AS c JOIN perdure_runs AS r ON r.id = c.run
WHERE c.removed > 0 AND (r.run_id = :root OR r.run_id > :root || '/' AND r.run_id < :root || '0') ORDER BY r.id

-- name: prune_up_to
UPDATE perdure_checkpoints SET removed = :removed, head = :head, by = :by, at = :now WHERE run = :run

-- name: take_in_checkpoint
INSERT INTO perdure_checkpoints (run, seq, removed, head, by, at) VALUES (?, ?, ?, ?, ?, ?)

-- name: checkpointed_runs
-- The runs of which events can be removed: no worker holds them, and they have a checkpoint with events before it.
SELECT r.id, r.run_id, r.status, r.updated_at, c.seq - 1 - CASE WHEN c.removed > 1 THEN c.removed ELSE 1 END
FROM perdure_checkpoints AS c JOIN perdure_runs AS r ON r.id = c.run
WHERE r.id > :after AND r.holder IS NULL AND r.specimen IS NULL AND c.seq > 2 AND c.seq > c.removed + 1
ORDER BY r.id LIMIT :limit

-- name: insert_batch
INSERT INTO perdure_batches (batch, verb, query, given, by, at) VALUES (?, ?, ?, ?, ?, ?)

-- name: batch
SELECT batch, verb, query, given, by, at, ended_at FROM perdure_batches WHERE batch = ?

-- name: interrupted_batches
SELECT batch, verb, query, given, by, at, ended_at FROM perdure_batches WHERE verb = ? AND ended_at IS NULL ORDER BY at DESC

-- name: end_batch
UPDATE perdure_batches SET ended_at = :now WHERE batch = :batch AND ended_at IS NULL
