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
    status = ?9, waiting_for = ?10, error = ?11, crashes = iif(?12, 0, crashes), attention = ?13
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_release
-- The guard, and the holder gives the run up: to whoever claims it from ready_at on, or for good.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2, head), updated_at = max(updated_at, ?3),
    status = ?9, waiting_for = ?10, error = ?11, crashes = iif(?12, 0, crashes), attention = ?13, ready_at = ?14, holder = NULL, nonce = NULL
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: insert_event
INSERT INTO perdure_events (id, event_id, ts, epoch, call, cause, data, hash) VALUES (?1 << 32 | ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)

-- name: insert_blob
-- Content-addressed: a second copy of the same bytes is the same blob.
INSERT OR IGNORE INTO perdure_blobs (digest, data) VALUES (?, ?)

-- name: blobs_to_keep
-- Those that are there: all of them, since nobody else writes meanwhile.
SELECT digest FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))

-- name: consume_inbox
-- The events of this commit stand for these rows now.
DELETE FROM perdure_inbox WHERE id = ? AND run = ?

-- name: unread_inbox_of_run
-- Whether anything has arrived that this commit does not stand for.
SELECT 1 FROM perdure_inbox WHERE run = ? AND id NOT IN (SELECT value FROM json_each(?)) LIMIT 1

-- name: guard_of_run
-- What a refused append ran into, to say so in words.
SELECT status, seq, epoch, holder, nonce FROM perdure_runs WHERE id = ?

-- name: run_key
SELECT id FROM perdure_runs WHERE run_id = ?

-- name: event_at
-- Told by its hash: the id of one that came through the inbox is the same whoever has journaled it.
SELECT hash FROM perdure_events WHERE id = (? << 32 | ?)

-- == Reading ==========================================================================================================

-- name: run_by_id
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs WHERE run_id = ?

-- name: run_to_change
-- As run_by_id, and nobody else writes to the run before this transaction ends: here nobody could in any case.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs WHERE run_id = ?

-- name: family_of_run
-- Those below it: a child's id is its parent's, a slash and a number, and '0' comes right after '/'.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE run_id > :run_id || '/' AND run_id < :run_id || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')

-- name: family_to_change
-- As family_of_run, the oldest first, for whoever writes to them.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE run_id > :run_id || '/' AND run_id < :run_id || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')
ORDER BY id

-- name: list_runs
-- Newest first. created_at pages, and id settles ties.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE (:before IS NULL OR created_at < :before)
    AND (:status IS NULL OR status = :status)
    AND (:agent IS NULL OR agent = :agent)
    AND (:tenant IS NULL OR tenant = :tenant)
ORDER BY created_at DESC, id DESC LIMIT :limit

-- name: read_events
-- data as a blob: the very bytes that were hashed, even when they are no longer text.
SELECT seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB)
FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + :after
    AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + 4294967296
ORDER BY id

-- name: first_events
SELECT id >> 32, seq, event_id, ts, epoch, call, cause, CAST(data AS BLOB)
FROM perdure_events WHERE id IN (SELECT (value << 32) + 1 FROM json_each(?))

-- name: stored_events
-- For verify, which also finds what a damaged page still shows: data that is no text any more, and a key that no longer is the run's,
-- which a scan of the keys between two others would not look at.
SELECT seq, event_id, ts, epoch, call, cause, CASE typeof(data) WHEN 'text' THEN CAST(data AS BLOB) END, hash
FROM perdure_events WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id)
    AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + 4294967296
    AND run = (SELECT id FROM perdure_runs WHERE run_id = :run_id)
ORDER BY id

-- name: hash_at
SELECT hash FROM perdure_events WHERE id = (SELECT id << 32 FROM perdure_runs WHERE run_id = ?) + ?

-- name: growing_runs
-- What may have changed since somebody knew all runs up to :newest: those that are new, and those that had not finished.
-- A place is (0, id): one writer at a time gives ids in the order of commits.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id, 0
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

-- name: runs_in_no_line
SELECT count(*), min(run_id) FROM perdure_runs WHERE line IS NULL AND ready_at IS NOT NULL

-- name: schema_objects
SELECT type, name, sql FROM sqlite_schema WHERE name LIKE 'perdure\_%' ESCAPE '\' ORDER BY type, name

-- name: damage
-- Every page, and every index against its table: a run that an index has lost would not be listed, and so not be verified either.
PRAGMA integrity_check(10)

-- name: blob
SELECT data FROM perdure_blobs WHERE digest = ?

-- name: data_version
PRAGMA data_version

-- == Creating and posting =============================================================================================

-- name: insert_run
-- A child stands under the budget that its parent stands under, unless it gets one of its own. No row when the id is taken, or was
-- that of a run that is pruned (T14). Its number is new as well: SQLite would use that of the youngest run again once that is gone.
INSERT INTO perdure_runs (id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, ready_at, seq, head, epoch,
    created_at, updated_at, priority, parent, parent_call, parent_seq, depth, line, ledger)
SELECT max(ifnull((SELECT max(id) FROM perdure_runs), 0), ifnull((SELECT max(number) FROM perdure_pruned), 0)) + 1,
    :run_id, :agent, :version, :tenant, :actor, :queue, :target, :input_digest, 'queued', :ready_at, 1, :head, 0, :ts, :ts,
    :priority, :parent, :parent_call, :parent_seq, :depth, :line, (SELECT ledger FROM perdure_runs WHERE run_id = :parent)
WHERE NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE run_id IN (:run_id, :root) AND status <> 'returned')
ON CONFLICT (run_id) DO NOTHING RETURNING id, ledger

-- name: post_to_unheld
-- Nobody holds the run, or a dead worker does: what was posted is in its journal.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = max(updated_at, :now), status = :status, waiting_for = :waiting_for,
    attention = iif(:status = 'needs_attention', attention, NULL), ready_at = :ready_at, holder = NULL, nonce = NULL,
    lost = iif(holder IS NULL, lost, 2), lost_with = iif(holder IS NULL, lost_with, :beside)
WHERE id = :id

-- name: end_unheld
-- As post_to_unheld, and it is the last that the run takes.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = max(updated_at, :now), status = :status, waiting_for = NULL,
    attention = NULL, error = :error, crashes = 0, ready_at = NULL, holder = NULL, nonce = NULL
WHERE id = :id

-- name: first_event
SELECT CAST(data AS BLOB) FROM perdure_events WHERE id = (? << 32 | 1)

-- name: insert_inbox
INSERT INTO perdure_inbox (run, call, event_id, ts, data) VALUES (:id, :call, :event_id, :now, :data)

-- name: event_of_run
-- Whether a post has arrived in the journal, asked after a COMMIT with an unknown outcome.
SELECT 1 FROM perdure_events
WHERE id > (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id)
    AND id < (SELECT id << 32 FROM perdure_runs WHERE run_id = :run_id) + 4294967296 AND event_id = :event_id

-- name: inbox_event_of_run
-- Whether a post has arrived in the inbox, asked after a COMMIT with an unknown outcome.
SELECT 1 FROM perdure_inbox WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND event_id = :event_id

-- name: inbox_of_worker
SELECT i.id, r.run_id, i.call, CAST(i.data AS BLOB), i.event_id
FROM perdure_inbox AS i JOIN perdure_runs AS r ON r.id = i.run WHERE r.holder = ? ORDER BY i.id

-- name: inbox_of_run
SELECT i.id, r.run_id, i.call, CAST(i.data AS BLOB), i.event_id
FROM perdure_runs AS r JOIN perdure_inbox AS i ON i.run = r.id WHERE r.run_id = ? ORDER BY i.id

-- name: unread_of_run
SELECT id, call, event_id, CAST(data AS BLOB) FROM perdure_inbox WHERE run = ? ORDER BY id

-- name: remember_signal
-- Changes nothing when the run has had a signal with this key on this topic.
INSERT OR IGNORE INTO perdure_signals (run, topic, key) VALUES (?, ?, ?)

-- == What follows from events =========================================================================================

-- name: begin_append
-- One append of several: when what follows from its events is refused, it alone is undone.
SAVEPOINT perdure_append

-- name: keep_append
RELEASE perdure_append

-- name: undo_append
ROLLBACK TO perdure_append

-- name: relations_of_run
SELECT run_id, tenant, actor, queue, priority, depth, parent, parent_call, parent_seq, ledger IS NOT NULL,
    EXISTS (SELECT 1 FROM perdure_approvals AS a WHERE a.run = r.id AND a.status = 'pending')
FROM perdure_runs AS r WHERE id = ?

-- name: insert_approval
-- Changes nothing when the id is taken.
INSERT OR IGNORE INTO perdure_approvals (approval, run, seq, call, action, asked_at, deciders, expires_at)
VALUES (:approval, :run, :seq, :call, :action, :asked_at, :deciders, :expires_at)

-- name: consume_approval
-- G9: this very call with these very arguments, approved, not used before and not expired; or nothing changes.
UPDATE perdure_approvals SET status = 'consumed'
WHERE approval = :approval AND run = :run AND call = :call AND action = :tool AND digest = :digest AND status = 'approved'
    AND (expires_at IS NULL OR expires_at > :ts)

-- name: withdraw_approvals
-- The run has ended: nobody wants the answer any more.
UPDATE perdure_approvals SET status = 'withdrawn', settled_at = :ts WHERE run = :run AND status = 'pending'

-- name: change_approval
UPDATE perdure_approvals SET status = :status, deciders = :deciders, expires_at = :expires_at, escalated = :escalated, voters = :voters,
    digest = :digest, settled_by = :settled_by, note = :note, settled_at = :settled_at
WHERE id = :id

-- name: approval_by_id
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, CAST(e.data AS BLOB)
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run JOIN perdure_events AS e ON e.id = (a.run << 32 | a.seq)
WHERE a.approval = ?

-- name: approval_to_change
-- As approval_by_id, for whoever holds its run with run_to_change: always that one first.
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, CAST(e.data AS BLOB)
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run JOIN perdure_events AS e ON e.id = (a.run << 32 | a.seq)
WHERE a.approval = ?

-- name: list_approvals
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, CAST(e.data AS BLOB)
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run JOIN perdure_events AS e ON e.id = (a.run << 32 | a.seq)
WHERE a.status IN (SELECT value FROM json_each(:statuses))
    AND (:tenant IS NULL OR r.tenant = :tenant)
    AND (:run_id IS NULL OR r.run_id = :run_id)
ORDER BY a.expires_at IS NULL, a.expires_at, a.asked_at, a.id LIMIT :limit

-- == Budgets and costs ================================================================================================

-- name: insert_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed)
VALUES (:run, :above, :usd_micros, :tokens, :calls, :busy_us, :on_exceed)

-- name: own_ledger
UPDATE perdure_runs SET ledger = id WHERE id = ?

-- name: charge_budgets
-- The run's budget and all above it, or the sum of the parts would exceed the whole.
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

-- name: give_back
DELETE FROM perdure_reserved WHERE run = ? RETURNING usd_micros, tokens, calls, busy_us

-- name: reserved_by_run
SELECT usd_micros, tokens, calls, busy_us FROM perdure_reserved WHERE run = (SELECT id FROM perdure_runs WHERE run_id = ?)

-- name: raise_budget
-- What has no limit keeps none.
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

-- name: over_budget
-- Of the runs under this budget, those that stand still for want of one, each with its last word about that. CROSS JOIN: from budgets to runs.
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
-- The beginnings, ends and settlements of attempts, by runs and in order, from a place on.
-- CROSS JOIN: from runs to events, so that nothing is sorted.
SELECT r.id, e.seq, r.run_id, r.agent, r.tenant, e.call, e.type, e.ts, CAST(e.data AS BLOB)
FROM perdure_runs AS r CROSS JOIN perdure_events AS e ON e.id > (r.id << 32 | iif(r.id = :run, :seq, 0)) AND e.id <= (r.id << 32 | 4294967295)
WHERE r.id >= :run AND r.updated_at >= :since AND (:tenant IS NULL OR r.tenant = :tenant)
    AND e.type IN ('tool_call_initiated', 'tool_call_completed', 'tool_call_failed', 'tool_call_in_doubt',
        'tool_call_resolved', 'model_call_initiated', 'model_call_completed', 'model_call_failed', 'run_cancelled')
ORDER BY r.id, e.id LIMIT :limit

-- == Notices ==========================================================================================================

-- name: insert_notice
INSERT INTO perdure_notices (run, seq, next_at) VALUES (?, ?, ?)

-- name: due_notices
SELECT id, run, seq, attempts FROM perdure_notices WHERE next_at <= ? ORDER BY next_at, id LIMIT ?

-- name: notices_to_take
-- As due_notices, for one taker at a time.
SELECT id, run, seq, attempts FROM perdure_notices WHERE next_at <= ? ORDER BY next_at, id LIMIT ?

-- name: take_notice
-- Until next_at it belongs to whoever has taken it.
UPDATE perdure_notices SET next_at = ?, attempts = attempts + 1 WHERE id = ?

-- name: notice
SELECT next_at, attempts FROM perdure_notices WHERE id = ?

-- name: event_of_notice
SELECT r.run_id, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, CAST(e.data AS BLOB)
FROM perdure_runs AS r JOIN perdure_events AS e ON r.id = ? AND e.id = (r.id << 32 | ?)

-- name: delete_notice
DELETE FROM perdure_notices WHERE id = ?

-- name: put_notice_off
UPDATE perdure_notices SET next_at = ?, error = ? WHERE id = ?

-- name: failing_notices
-- How many have been tried in vain, and what was said about the youngest of them.
SELECT count(*), (SELECT error FROM perdure_notices WHERE error IS NOT NULL ORDER BY id DESC LIMIT 1)
FROM perdure_notices WHERE error IS NOT NULL

-- name: next_notice
SELECT min(next_at) FROM perdure_notices

-- == Who works ========================================================================================================

-- name: line
SELECT id FROM perdure_lines WHERE agent = ? AND version = ? AND queue = ? AND tenant = ? AND priority = ?

-- name: insert_line
-- Changes nothing when somebody else has made it.
INSERT OR IGNORE INTO perdure_lines (agent, version, queue, tenant, priority) VALUES (?, ?, ?, ?, ?)

-- name: kind_of_run
SELECT agent, queue, tenant, priority FROM perdure_runs WHERE id = ?

-- name: move_run
UPDATE perdure_runs SET version = ?, line = ? WHERE id = ?

-- name: lines_with_ready_runs
-- The served lines whose first run is ready, each with that and its tenant's last turn. CROSS JOIN: from what is served to its lines.
SELECT l.id, l.queue, l.tenant, l.priority,
    (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at <= :now ORDER BY ready_at LIMIT 1) AS ready_at,
    ifnull((SELECT turn FROM perdure_turns AS t WHERE t.queue = l.queue AND t.tenant = l.tenant), 0)
FROM json_each(:served) AS s CROSS JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
WHERE (:queues IS NULL OR l.queue IN (SELECT value FROM json_each(:queues)))
    AND EXISTS (SELECT 1 FROM perdure_runs WHERE line = l.id AND ready_at <= :now)

-- name: ready_below
-- The ready runs of a family; see family_of_run. Suspects only if they are wanted.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE run_id > :run_id || '/' AND run_id < :run_id || '0' AND ready_at <= :now AND :queues IS NULL
    AND (:suspects OR crashes + (lost > 0) < 2)
    AND EXISTS (SELECT 1 FROM json_each(:served) AS s WHERE s.value ->> 0 = agent AND s.value ->> 1 = version)
ORDER BY ready_at, id LIMIT :limit

-- name: ready_of_line
-- The ready runs of a line from a place on, those that have waited longest first. Suspects only if they are wanted.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE line = :line AND ready_at <= :now AND (ready_at, id) > (:after_ready, :after_id)
    AND (:suspects OR crashes + (lost > 0) < 2)
ORDER BY ready_at, id LIMIT :limit

-- name: suspects_of_worker
SELECT crashes, lost_with FROM perdure_runs WHERE holder = ? AND crashes >= 2

-- name: held_suspects
-- Of all workers.
SELECT holder, crashes, lost_with FROM perdure_runs WHERE holder IS NOT NULL AND crashes >= 2

-- name: load_of_worker
-- How many runs it holds, and how many suspects among them.
SELECT count(*), count(*) FILTER (WHERE crashes >= 2) FROM perdure_runs WHERE holder = ?

-- name: held_by_party
-- How many runs of each tenant in each queue are held. Counted in the index of held runs alone.
SELECT l.queue, l.tenant, sum(h.held)
FROM (SELECT line, count(*) AS held FROM perdure_runs WHERE holder IS NOT NULL GROUP BY line) AS h
    CROSS JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: ready_by_party
-- How many runs of each tenant in each queue are ready, and since when the one of them that has waited longest.
SELECT l.queue, l.tenant, sum(h.ready), min(h.since)
FROM (SELECT line, count(*) AS ready, min(ready_at) AS since FROM perdure_runs WHERE ready_at <= :now GROUP BY line) AS h
    CROSS JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: newest_turn
SELECT ifnull(max(turn), 0) FROM perdure_turns

-- name: had_turn
INSERT INTO perdure_turns (queue, tenant, turn) VALUES (?, ?, ?) ON CONFLICT (queue, tenant) DO UPDATE SET turn = excluded.turn

-- name: claim_run
-- A new epoch over the old one: whoever held the run before is refused from here on.
UPDATE perdure_runs SET epoch = :epoch, nonce = :nonce, holder = :worker, seq = :seq, head = :head, crashes = :crashes, lost_with = :lost_with,
    lost = 0, ready_at = NULL, waiting_for = NULL, error = NULL, attention = NULL, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'running')
WHERE id = :id

-- name: next_ready
-- The head of each served line, whether it is ready or sleeps.
SELECT min((SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1))
FROM json_each(:served) AS s CROSS JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
WHERE :queues IS NULL OR l.queue IN (SELECT value FROM json_each(:queues))

-- name: left_behind
-- From ready children in lines that are not served upwards, until a parent is of a kind that is: that one can name the kind below it.
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
-- Again for the same worker: what it serves now.
INSERT INTO perdure_workers (worker, name, pid, started_at, beat_at, serves, queues)
VALUES (:worker, :name, :pid, :now, :now, :served, :queues)
ON CONFLICT (worker) DO UPDATE SET name = excluded.name, pid = excluded.pid, beat_at = excluded.beat_at, serves = excluded.serves,
    queues = excluded.queues, started_at = iif(pid = excluded.pid, started_at, excluded.started_at)

-- name: delete_worker
DELETE FROM perdure_workers WHERE worker = ?

-- name: beat
-- Always another one than the last, or nobody would see it; and whatever that one said: a clock may have been set back.
UPDATE perdure_workers SET beat_at = iif(beat_at = :now, :now + 1, :now) WHERE worker = :worker

-- name: worker_by_id
SELECT name, beat_at FROM perdure_workers WHERE worker = ?

-- name: list_workers
-- The last column: whether its lease has run out.
SELECT worker, name, pid, started_at, beat_at, (SELECT count(*) FROM perdure_runs WHERE holder = worker), serves, queues,
    beat_at < :now - :lease_us
FROM perdure_workers ORDER BY started_at, worker

-- name: holders_without_worker
SELECT DISTINCT holder FROM perdure_runs
WHERE holder IS NOT NULL AND holder NOT IN (SELECT worker FROM perdure_workers)

-- name: lose_runs
-- Their holder is gone: claimable at once, and the next claim knows that it is a takeover, and how many others may be to blame.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued'), lost_with = iif(crashes >= 2, :beside_suspects, :beside)
WHERE holder = :worker

-- name: held_by_worker
SELECT run_id, epoch FROM perdure_runs WHERE holder = ?

-- name: lose_run
-- As lose_runs, for one of them, unless it was claimed anew since we looked.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued'), lost_with = iif(crashes >= 2, :beside_suspects, :beside)
WHERE run_id = :run_id AND holder = :worker AND epoch = :epoch

-- name: lose_runs_of_silent_worker
-- As lose_runs, unless the worker has given another sign of life since.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now, updated_at = max(updated_at, :now),
    status = iif(status = 'cancelling', status, 'queued'), lost_with = iif(crashes >= 2, :beside_suspects, :beside)
WHERE holder = :worker AND EXISTS (SELECT 1 FROM perdure_workers AS w WHERE w.worker = :worker AND w.beat_at = :beat_at)

-- == Rates ============================================================================================================

-- name: rate
SELECT due, paused_until, seen_at FROM perdure_rates WHERE key = ?

-- name: make_rate
-- So that there is a row to change, and of all who come for a place one goes first.
INSERT OR IGNORE INTO perdure_rates (key, due, paused_until, seen_at) VALUES (?, 0, 0, 0)

-- name: rate_to_change
SELECT due, paused_until, seen_at FROM perdure_rates WHERE key = ?

-- name: book_rate
INSERT INTO perdure_rates (key, due, paused_until, seen_at) VALUES (:key, :due, :paused_until, :seen_at)
ON CONFLICT (key) DO UPDATE SET due = excluded.due, paused_until = excluded.paused_until, seen_at = excluded.seen_at

-- name: hold_rate_back
INSERT INTO perdure_rates (key, due, paused_until, seen_at) VALUES (:key, 0, :until, 0)
ON CONFLICT (key) DO UPDATE SET paused_until = max(paused_until, excluded.paused_until)

-- == Moving, pruning ==================================================================================================

-- name: moved
SELECT state, to_url, by, at FROM perdure_moved

-- name: lock_journal
-- Nothing to do: whoever writes is alone.
SELECT 1

-- name: lock_workers
SELECT 1

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

-- name: other_tables
SELECT name FROM sqlite_schema WHERE type = 'table' AND substr(name, 1, 8) <> 'perdure_' AND substr(name, 1, 7) <> 'sqlite_' ORDER BY name

-- name: roots
-- Those that stand above a family, in the order of their numbers.
SELECT id, run_id FROM perdure_runs WHERE id > :after AND instr(run_id, '/') = 0 ORDER BY id LIMIT :limit

-- name: families
-- All runs of these families; see family_of_run. CROSS JOIN: from the roots to the runs.
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
-- Everything but what is this database's own affair: numbers, and who held it. The last column: whose budget applies first.
SELECT r.id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes,
    error, created_at, updated_at, priority, attention, r.parent, parent_call, parent_seq, depth, lost_with,
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
-- The first columns: whose it is, and whose the one above it is.
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
-- A run from another journal, with the time of its next wake-up and everything else. No row when the id is taken.
INSERT INTO perdure_runs (id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes, error,
    created_at, updated_at, priority, attention, parent, parent_call, parent_seq, depth, lost_with, line, ledger)
VALUES ((SELECT max(ifnull((SELECT max(id) FROM perdure_runs), 0), ifnull((SELECT max(number) FROM perdure_pruned), 0)) + 1), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT ledger FROM perdure_runs WHERE run_id = ?))
ON CONFLICT (run_id) DO NOTHING RETURNING id

-- name: take_in_approval
INSERT INTO perdure_approvals (run, approval, seq, call, action, asked_at, status, deciders, expires_at, escalated, voters, digest, settled_by,
    note, settled_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: take_in_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed, spent_usd_micros,
    spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us)
VALUES (?, (SELECT id FROM perdure_runs WHERE run_id = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: take_in_inbox
INSERT INTO perdure_inbox (run, call, event_id, ts, data) VALUES (?, ?, ?, ?, ?)

-- name: take_in_notice
INSERT INTO perdure_notices (run, seq, next_at, attempts, error) VALUES (?, ?, ?, ?, ?)

-- name: use_blob
INSERT OR IGNORE INTO perdure_blob_uses (run, digest) VALUES (?, ?)

-- name: known_blobs
SELECT digest FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))

-- name: rates
SELECT key, due, paused_until, seen_at FROM perdure_rates

-- name: run_to_keep
-- For whoever adds to its family: it is not pruned before this transaction ends.
SELECT id FROM perdure_runs WHERE run_id = ?

-- name: prunable
-- Families whose root has ended so and of which nothing has happened since: how many runs and events they have.
SELECT r.id, r.run_id,
    1 + (SELECT count(*) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'),
    (r.seq + (SELECT ifnull(sum(k.seq), 0) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'))
FROM perdure_runs AS r
WHERE r.id > :after AND instr(r.run_id, '/') = 0 AND r.status IN (SELECT value FROM json_each(:statuses)) AND r.updated_at < :before
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'
            AND (k.status NOT IN ('succeeded', 'failed', 'cancelled') OR k.updated_at >= :before))
    AND NOT EXISTS (SELECT 1 FROM perdure_notices AS n WHERE n.run = r.id)
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k JOIN perdure_notices AS n ON n.run = k.id
        WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0')
ORDER BY r.id LIMIT :limit

-- name: runs_to_prune
-- Nothing to wait for: whoever writes is alone.
SELECT id FROM perdure_runs WHERE id IN (SELECT value FROM json_each(:runs)) ORDER BY id

-- name: unsent_notices
-- The runs of which somebody still has to hear.
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

-- name: prune_runs
DELETE FROM perdure_runs WHERE id IN (SELECT value FROM json_each(:runs))

-- name: blobs_to_prune
-- Those that the runs have put there.
SELECT digest FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))

-- name: prune_blobs
DELETE FROM perdure_blobs WHERE digest IN (SELECT unhex(value) FROM json_each(:digests))
    AND NOT EXISTS (SELECT 1 FROM perdure_blob_uses AS u WHERE u.digest = perdure_blobs.digest)

-- name: tombstone
-- The last one, if it has several: a copy may have been taken back more than once.
SELECT id, run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by FROM perdure_pruned WHERE run_id = ? AND status <> 'returned' ORDER BY id DESC LIMIT 1

-- name: tombstones
SELECT id, run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by FROM perdure_pruned WHERE id > :after ORDER BY id LIMIT :limit

-- name: take_in_tombstone
INSERT INTO perdure_pruned (run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: count_pruned
SELECT count(*), max(pruned_at) FROM perdure_pruned WHERE status <> 'returned'


-- == Opening ==========================================================================================================

-- name: has_schema_table
SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'perdure_schema'

-- name: applied_migrations
SELECT version, checksum FROM perdure_schema ORDER BY version

-- name: record_migration
INSERT INTO perdure_schema (version, checksum, applied_at) VALUES (?, ?, CAST(unixepoch('subsec') * 1000000 AS INTEGER))
