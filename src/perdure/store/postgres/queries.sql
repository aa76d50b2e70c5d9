-- Every statement that perdure sends to PostgreSQL by name, under the names that the SQLite journal has, with the same parameters.
-- Values come in as parameters only; nothing here is ever assembled from data.
--
-- What differs from SQLite: there are several writers at a time. So whatever is read in order to be changed is locked (FOR NO KEY
-- UPDATE; several runs always in ascending order of their numbers), claims pass by what others are at (SKIP LOCKED), and leases are
-- judged by the clock of the database.

-- == The append path ==================================================================================================

-- name: advance
-- The guard: exactly one row changes, or somebody else has the run or its seq has moved.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint)
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_project
-- The guard, and what the events did to the projection. `holder` and `ready_at` stay as they are, and so do their indexes.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint),
    status = ?9, waiting_for = ?10, error = ?11, crashes = CASE WHEN ?12 THEN 0 ELSE crashes END, attention = ?13
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_release
-- The guard, and the holder gives the run up: to whoever claims it from ready_at on, or for good.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint),
    status = ?9, waiting_for = ?10, error = ?11, crashes = CASE WHEN ?12 THEN 0 ELSE crashes END, attention = ?13, ready_at = ?14,
    holder = NULL, nonce = NULL
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_park
-- As advance_and_release, goes right behind lock_to_release. Ready at ?15 when something lies in its inbox that the holder has not seen (?16).
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint),
    status = ?9, waiting_for = ?10, error = ?11, crashes = CASE WHEN ?12 THEN 0 ELSE crashes END, attention = ?13, holder = NULL, nonce = NULL,
    ready_at = CASE WHEN ?15::bigint IS NOT NULL AND EXISTS (SELECT 1 FROM perdure_inbox AS i WHERE i.run = ?4 AND i.id <> ALL (?16::bigint[]))
        THEN ?15 ELSE ?14::bigint END
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8 AND current_setting('transaction_isolation') = 'read committed'

-- name: lock_runs
-- Before an append that touches more than its own run, or gives its run up: those runs and the parents of those that end, in the order
-- in which everybody locks. What is read after this is what was committed before: an inbox looked at earlier could be out of date.
SELECT id FROM perdure_runs
WHERE id = ANY (:keys::bigint[]) OR run_id = ANY (ARRAY(SELECT r.parent FROM perdure_runs AS r WHERE r.id = ANY (:ending::bigint[])))
ORDER BY id FOR NO KEY UPDATE

-- name: lock_budgets
-- Before appends that charge: all budgets that any of them charges, in the order in which everybody locks.
WITH RECURSIVE applies (run) AS (
    SELECT ledger FROM perdure_runs WHERE id = ANY (:keys::bigint[])
    UNION
    SELECT b.above FROM perdure_budgets AS b JOIN applies ON b.run = applies.run
)
SELECT run FROM perdure_budgets WHERE run IN (SELECT run FROM applies) ORDER BY run FOR NO KEY UPDATE

-- name: fence
-- After an append without an answer: waits for it if it is under way, and refuses it if it comes later. The nonce is one of those that
-- this lease has had; the epoch stays, since the same worker goes on.
UPDATE perdure_runs SET nonce = :nonce WHERE id = :id AND epoch = :epoch AND holder = :worker AND nonce = ANY (:nonces::bytea[])

-- name: lock_to_release
-- Goes right before append_many, in its transaction, for runs that are given up: what is read after this is what was committed before.
-- An inbox that append_many looked at while somebody was posting could be out of date. Whoever has a row locked is not waited for. Where
-- transactions are stricter than READ COMMITTED both would see the same, so that append_many leaves such runs to the common path there.
SELECT id FROM perdure_runs WHERE id = ANY (:keys::bigint[]) ORDER BY id FOR NO KEY UPDATE NOWAIT

-- name: append_many
-- The guarded appends of many runs in one statement, which is one transaction and one round trip. Each run's guard is its own; what it
-- guards is written, and the rest is not. Only for appends from which nothing else follows. A run that is given up is ready at once when
-- something lies in its inbox that its holder has not seen; see lock_to_release.
WITH given AS (
    SELECT * FROM unnest(:ids::bigint[], :epochs::bigint[], :nonces::bytea[], :holders::text[], :befores::bigint[], :seqs::bigint[],
        :heads::bytea[], :times::bigint[], :projects::boolean[], :statuses::text[], :waits::text[], :errors::text[], :progresses::boolean[],
        :attentions::text[], :ends::boolean[], :releases::boolean[], :readies::bigint[], :wakes::bigint[])
    AS g (id, epoch, nonce, holder, before, seq, head, ts, projects, status, waiting_for, error, progress, attention, ends, releases,
        ready_at, wake_at)
), moved AS (
    UPDATE perdure_runs AS r SET seq = g.seq, head = coalesce(g.head, r.head), updated_at = greatest(r.updated_at, g.ts),
        status = CASE WHEN g.projects THEN g.status ELSE r.status END,
        waiting_for = CASE WHEN g.projects THEN g.waiting_for ELSE r.waiting_for END,
        error = CASE WHEN g.projects THEN g.error ELSE r.error END,
        attention = CASE WHEN g.projects THEN g.attention ELSE r.attention END,
        crashes = CASE WHEN g.progress THEN 0 ELSE r.crashes END,
        holder = CASE WHEN g.ends OR g.releases THEN NULL ELSE r.holder END,
        nonce = CASE WHEN g.ends OR g.releases THEN NULL ELSE r.nonce END,
        ready_at = CASE WHEN NOT g.releases THEN r.ready_at
            WHEN g.wake_at IS NOT NULL AND EXISTS (SELECT 1 FROM perdure_inbox AS i WHERE i.run = r.id AND i.id <> ALL (:seen::bigint[])) THEN g.wake_at
            ELSE g.ready_at END
    FROM given AS g WHERE r.id = g.id AND r.epoch = g.epoch AND r.nonce = g.nonce AND r.holder = g.holder AND r.seq = g.before
        AND (NOT g.ends OR r.parent IS NULL AND r.ledger IS NULL)
        AND (NOT g.releases OR current_setting('transaction_isolation') = 'read committed')
    RETURNING r.id, g.ends, g.ts
), withdrawn AS (
    UPDATE perdure_approvals AS a SET status = 'withdrawn', settled_at = m.ts FROM moved AS m
    WHERE m.ends AND a.run = m.id AND a.status = 'pending'
), consumed AS (
    DELETE FROM perdure_inbox AS i USING moved AS m WHERE i.run = m.id AND i.id = ANY (:consumed::bigint[])
), written AS (
    INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash)
    SELECT e.* FROM unnest(:e_runs::bigint[], :e_seqs::bigint[], :e_ids::bytea[], :e_times::bigint[], :e_epochs::bigint[],
        :e_calls::bigint[], :e_causes::bigint[], :e_data::text[], :e_hashes::bytea[])
    AS e (run, seq, event_id, ts, epoch, call, cause, data, hash)
    WHERE e.run IN (SELECT id FROM moved)
)
SELECT id FROM moved

-- name: insert_event
INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_blob
-- Content-addressed: a second copy of the same bytes is the same blob.
INSERT INTO perdure_blobs (digest, data) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING

-- name: blobs_to_keep
-- Those that are there, which stay until the commit that says who uses them: nobody finds in between that they are not needed any more.
-- KEY SHARE: all who store the same blob may have it at once, and only a prune waits. It takes the right to UPDATE, as every row lock does.
SELECT digest FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value)))
ORDER BY digest FOR KEY SHARE

-- name: consume_inbox
-- The events of this commit stand for these rows now.
DELETE FROM perdure_inbox WHERE id = ? AND run = ?

-- name: unread_inbox_of_run
-- Whether anything has arrived that this commit does not stand for.
SELECT 1 FROM perdure_inbox WHERE run = ? AND id NOT IN (SELECT value::bigint FROM jsonb_array_elements_text(?::jsonb) AS v (value)) LIMIT 1

-- name: guard_of_run
-- What a refused append ran into, to say so in words.
SELECT status, seq, epoch, holder, nonce FROM perdure_runs WHERE id = ?

-- name: run_key
SELECT id FROM perdure_runs WHERE run_id = ?

-- name: event_at
-- Told by its hash: the id of one that came through the inbox is the same whoever has journaled it.
SELECT hash FROM perdure_events WHERE run = ? AND seq = ?

-- == Reading ==========================================================================================================

-- name: run_by_id
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs WHERE run_id = ?

-- name: run_to_change
-- As run_by_id, and nobody else writes to the run before this transaction ends.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs WHERE run_id = ? FOR NO KEY UPDATE

-- name: family_of_run
-- Those below it: a child's id is its parent's, a slash and a number, and '0' comes right after '/'.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE run_id > :run_id::text || '/' AND run_id < :run_id::text || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')

-- name: family_to_change
-- As family_of_run, the oldest first, and nobody else writes to them before this transaction ends.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE run_id > :run_id::text || '/' AND run_id < :run_id::text || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')
ORDER BY id FOR NO KEY UPDATE

-- name: list_runs
-- Newest first. created_at pages, and id settles ties.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE (:before::bigint IS NULL OR created_at < :before)
    AND (:status::text IS NULL OR status = :status)
    AND (:agent::text IS NULL OR agent = :agent)
    AND (:tenant::text IS NULL OR tenant = :tenant)
ORDER BY created_at DESC, id DESC LIMIT :limit

-- name: read_events
-- data as bytes: those that were hashed.
SELECT seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8')
FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND seq > :after ORDER BY seq

-- name: first_events
SELECT run, seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8')
FROM perdure_events WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(?::jsonb) AS v (value))) AND seq = 1

-- name: stored_events
SELECT seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8'), hash
FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) ORDER BY seq

-- name: hash_at
SELECT hash FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = ?) AND seq = ?

-- name: growing_runs
-- What may have changed since somebody knew all runs up to a place: those that are new, and those that had not finished.
-- Ids and transaction numbers are given before the commit. Only what was born before every transaction that is still under way counts:
-- nothing can appear below it any more. A dump that was restored into a younger server has numbers from its future; those are old.
-- Each part by itself, with conditions on the columns alone, so that the index gives the rows of a page in their order.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id, commit
FROM (
    (SELECT r.*, 0::bigint AS commit FROM perdure_runs AS r
    WHERE born >= pg_snapshot_xmax(pg_current_snapshot()) AND :after_commit::bigint = 0 AND id > :after::bigint
        AND ((0, id) > (:newest_commit::bigint, :newest::bigint) OR status NOT IN ('succeeded', 'failed', 'cancelled'))
    ORDER BY id LIMIT :limit)
    UNION ALL
    (SELECT r.*, born::text::bigint AS commit FROM perdure_runs AS r
    WHERE born < pg_snapshot_xmin(pg_current_snapshot()) AND (born, id) > (:after_commit::bigint::text::xid8, :after::bigint)
        AND ((born, id) > (:newest_commit::bigint::text::xid8, :newest::bigint) OR status NOT IN ('succeeded', 'failed', 'cancelled'))
    ORDER BY born, id LIMIT :limit)
) AS settled
ORDER BY commit, id LIMIT :limit

-- name: journals_without_run
-- From the first event of one journal straight to that of the next, however long they are.
WITH RECURSIVE journals (number) AS (
    SELECT min(run) FROM perdure_events
    UNION
    SELECT (SELECT min(run) FROM perdure_events WHERE run > number) FROM journals WHERE number IS NOT NULL
)
SELECT number, (SELECT count(*) FROM perdure_events WHERE run = number),
    (SELECT convert_to(data, 'UTF8') FROM perdure_events WHERE run = number AND seq = 1)
FROM journals WHERE number IS NOT NULL AND number NOT IN (SELECT id FROM perdure_runs)

-- name: triggers
SELECT c.relname, t.tgname, pg_get_triggerdef(t.oid), t.tgenabled::text
FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
WHERE NOT t.tgisinternal AND c.relname LIKE 'perdure\_%' AND c.relnamespace = current_schema()::regnamespace ORDER BY 1, 2

-- name: functions
SELECT proname, prosrc FROM pg_proc WHERE proname LIKE 'perdure\_%' AND pronamespace = current_schema()::regnamespace ORDER BY 1

-- name: blob
SELECT data FROM perdure_blobs WHERE digest = ?

-- == Creating and posting =============================================================================================

-- name: insert_run
-- A child stands under the budget that its parent stands under, unless it gets one of its own. No row when the id is taken, or was
-- that of a run that is pruned (T14).
INSERT INTO perdure_runs (run_id, agent, version, tenant, actor, queue, target, input_digest, status, ready_at, seq, head, epoch,
    created_at, updated_at, priority, parent, parent_call, parent_seq, depth, line, ledger)
SELECT :run_id::text, :agent::text, :version::text, :tenant::text, :actor::text, :queue::text, :target::text, :input_digest::text, 'queued',
    :ready_at::bigint, 1, :head::bytea, 0, :ts::bigint, :ts, :priority::bigint, :parent::text, :parent_call::bigint, :parent_seq::bigint,
    :depth::bigint, :line::bigint, (SELECT ledger FROM perdure_runs WHERE run_id = :parent::text)
WHERE NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE run_id IN (:run_id::text, :root::text) AND status <> 'returned')
ON CONFLICT (run_id) DO NOTHING RETURNING id, ledger

-- name: create_run
-- As insert_run and insert_event for a run that nobody else has to do with, in one statement. No row when its line is not there yet, the id
-- is taken, or was that of a run that is pruned: what it is then is found out by those two. A run that is just being pruned is looked for by
-- the same snapshot as its tombstone, which has one of them: ON CONFLICT alone would wait for the end of the prune, and find neither (T14).
-- The last column: whether it has rung for those who listen; they hear it once this is committed. Only one transaction at a time rings so,
-- one that is alone in its process, and the others by themselves afterwards: all that ring wait for each other's commit, and so could not
-- share the disk's.
WITH made AS (
    INSERT INTO perdure_runs (run_id, agent, version, tenant, actor, queue, target, input_digest, status, ready_at, seq, head, epoch,
        created_at, updated_at, priority, depth, line)
    SELECT :run_id::text, l.agent, l.version, l.tenant, :actor::text, l.queue, :target::text, :input_digest::text, 'queued',
        :ready_at::bigint, 1, :head::bytea, 0, :ts::bigint, :ts, l.priority, :depth::bigint, l.id
    FROM perdure_lines AS l
    WHERE l.agent = :agent AND l.version = :version AND l.queue = :queue AND l.tenant = :tenant AND l.priority = :priority
        AND NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE run_id = :run_id::text AND status <> 'returned')
        AND NOT EXISTS (SELECT 1 FROM perdure_runs WHERE run_id = :run_id::text)
    ON CONFLICT (run_id) DO NOTHING
    RETURNING run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
        seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
), written AS (
    INSERT INTO perdure_events (run, seq, event_id, ts, epoch, data, hash)
    SELECT made.id, 1, :event_id::bytea, :ts, 0, :data::text, :head FROM made
)
SELECT made.*, CASE WHEN :alone::boolean AND pg_try_advisory_xact_lock(hashtextextended('perdure bell', 0)) THEN pg_notify(:channel, :ring)::text = '' ELSE FALSE END
FROM made

-- name: signal_at_once
-- A signal into the journal of a run that is parked, in one statement: as post_to_unheld, insert_event and remember_signal, and the ring
-- that goes with them; the answer is whether it has rung (see create_run). No row when the run is not parked or has something in its inbox,
-- somebody has it locked or has changed it since this statement began, or it has had this very signal (:once is its key, or what stands for
-- one that was found not to have arrived): the common path finds out which. The chain is that of perdure.core.identity.link.
WITH seen AS MATERIALIZED (
    SELECT r.id, r.seq FROM perdure_runs AS r
    WHERE r.run_id = :run_id AND r.holder IS NULL AND r.status = ANY (:parked::text[])
        AND NOT EXISTS (SELECT 1 FROM perdure_inbox AS i WHERE i.run = r.id)
        AND NOT EXISTS (SELECT 1 FROM perdure_signals AS s WHERE s.run = r.id AND s.topic = :topic::text AND s.key = :once::text)
), parked AS (
    SELECT r.id, r.seq, r.epoch, r.head FROM seen AS s JOIN perdure_runs AS r ON r.id = s.id WHERE r.seq = s.seq
    FOR NO KEY UPDATE OF r SKIP LOCKED
), sealed AS (
    SELECT id, seq, epoch,
        sha256(head || convert_to(concat(seq + 1, '|', encode(:event_id::bytea, 'hex'), '|', :now::bigint, '|', epoch, '||', seq, '|', :data::text), 'UTF8')) AS hash
    FROM parked
), remembered AS (
    INSERT INTO perdure_signals (run, topic, key) SELECT id, :topic, :once FROM parked WHERE :has_key::boolean
), posted AS (
    UPDATE perdure_runs AS r SET seq = s.seq + 1, head = s.hash, updated_at = greatest(r.updated_at, :now), status = :status::text,
        waiting_for = NULL, attention = NULL, ready_at = :now
    FROM sealed AS s WHERE r.id = s.id RETURNING r.id
), written AS (
    INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash)
    SELECT s.id, s.seq + 1, :event_id, :now, s.epoch, NULL, s.seq, :data, s.hash FROM sealed AS s JOIN posted AS p ON p.id = s.id
)
SELECT CASE WHEN :alone::boolean AND pg_try_advisory_xact_lock(hashtextextended('perdure bell', 0)) THEN pg_notify(:channel, :ring)::text = '' ELSE FALSE END
FROM posted

-- name: post_to_unheld
-- Nobody holds the run, or a dead worker does: what was posted is in its journal.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = greatest(updated_at, :now::bigint), status = :status::text,
    waiting_for = :waiting_for, attention = CASE WHEN :status::text = 'needs_attention' THEN attention END, ready_at = :ready_at,
    holder = NULL, nonce = NULL, lost = CASE WHEN holder IS NULL THEN lost ELSE 2 END,
    lost_with = CASE WHEN holder IS NULL THEN lost_with ELSE :beside::bigint END
WHERE id = :id

-- name: end_unheld
-- As post_to_unheld, and it is the last that the run takes.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = greatest(updated_at, :now::bigint), status = :status, waiting_for = NULL,
    attention = NULL, error = :error, crashes = 0, ready_at = NULL, holder = NULL, nonce = NULL
WHERE id = :id

-- name: first_event
SELECT convert_to(data, 'UTF8') FROM perdure_events WHERE run = ? AND seq = 1

-- name: insert_inbox
INSERT INTO perdure_inbox (run, call, event_id, ts, data) VALUES (:id, :call, :event_id, :now, :data)

-- name: event_of_run
-- Whether a post has arrived in the journal, asked after a COMMIT with an unknown outcome.
SELECT 1 FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND event_id = :event_id

-- name: inbox_event_of_run
-- Whether a post has arrived in the inbox, asked after a COMMIT with an unknown outcome.
SELECT 1 FROM perdure_inbox WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND event_id = :event_id

-- name: inbox_of_worker
SELECT i.id, r.run_id, i.call, convert_to(i.data, 'UTF8'), i.event_id
FROM perdure_inbox AS i JOIN perdure_runs AS r ON r.id = i.run WHERE r.holder = ? ORDER BY i.id

-- name: inbox_of_run
SELECT i.id, r.run_id, i.call, convert_to(i.data, 'UTF8'), i.event_id
FROM perdure_runs AS r JOIN perdure_inbox AS i ON i.run = r.id WHERE r.run_id = ? ORDER BY i.id

-- name: unread_of_run
SELECT id, call, event_id, convert_to(data, 'UTF8') FROM perdure_inbox WHERE run = ? ORDER BY id

-- name: remember_signal
-- Changes nothing when the run has had a signal with this key on this topic.
INSERT INTO perdure_signals (run, topic, key) VALUES (?, ?, ?) ON CONFLICT DO NOTHING

-- == What follows from events =========================================================================================

-- name: begin_append
-- One append of several: when what follows from its events is refused, it alone is undone.
SAVEPOINT perdure_append

-- name: keep_append
RELEASE SAVEPOINT perdure_append

-- name: undo_append
ROLLBACK TO SAVEPOINT perdure_append

-- name: relations_of_run
SELECT run_id, tenant, actor, queue, priority, depth, parent, parent_call, parent_seq, ledger IS NOT NULL,
    EXISTS (SELECT 1 FROM perdure_approvals AS a WHERE a.run = r.id AND a.status = 'pending')
FROM perdure_runs AS r WHERE id = ?

-- name: insert_approval
-- Changes nothing when the id is taken.
INSERT INTO perdure_approvals (approval, run, seq, call, action, asked_at, deciders, expires_at)
VALUES (:approval, :run, :seq, :call, :action, :asked_at, :deciders, :expires_at) ON CONFLICT DO NOTHING

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
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, convert_to(e.data, 'UTF8')
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run JOIN perdure_events AS e ON e.run = a.run AND e.seq = a.seq
WHERE a.approval = ?

-- name: approval_to_change
-- As approval_by_id, for whoever holds its run with run_to_change: always that one first.
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, convert_to(e.data, 'UTF8')
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run JOIN perdure_events AS e ON e.run = a.run AND e.seq = a.seq
WHERE a.approval = ? FOR NO KEY UPDATE OF a

-- name: list_approvals
-- Their events are looked up for those alone that are shown: how many approvals have a status is more than the planner knows.
SELECT a.approval, a.run_id, a.call, a.agent, a.tenant, a.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, convert_to(e.data, 'UTF8')
FROM (
    SELECT a.*, r.run_id, r.agent, r.tenant, r.actor FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
    WHERE a.status = ANY (ARRAY(SELECT jsonb_array_elements_text(:statuses::jsonb)))
        AND (:tenant::text IS NULL OR r.tenant = :tenant)
        AND (:run_id::text IS NULL OR r.run_id = :run_id)
    ORDER BY a.expires_at NULLS LAST, a.asked_at, a.id LIMIT :limit
) AS a JOIN perdure_events AS e ON e.run = a.run AND e.seq = a.seq
ORDER BY a.expires_at NULLS LAST, a.asked_at, a.id

-- == Budgets and costs ================================================================================================

-- name: insert_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed)
VALUES (:run, :above, :usd_micros, :tokens, :calls, :busy_us, :on_exceed)

-- name: own_ledger
UPDATE perdure_runs SET ledger = id WHERE id = ?

-- name: charge_budgets
-- The run's budget and all above it, or the sum of the parts would exceed the whole. The root first: everybody locks in that order.
WITH RECURSIVE applies (run) AS (
    SELECT ledger FROM perdure_runs WHERE id = :run
    UNION
    SELECT b.above FROM perdure_budgets AS b JOIN applies ON b.run = applies.run
), locked AS (
    SELECT run FROM perdure_budgets WHERE run IN (SELECT run FROM applies) ORDER BY run FOR NO KEY UPDATE
)
UPDATE perdure_budgets AS b SET
    spent_usd_micros = spent_usd_micros + :spent_usd_micros, spent_tokens = spent_tokens + :spent_tokens,
    spent_calls = spent_calls + :spent_calls, spent_busy_us = spent_busy_us + :spent_busy_us,
    reserved_usd_micros = reserved_usd_micros + :reserved_usd_micros, reserved_tokens = reserved_tokens + :reserved_tokens,
    reserved_calls = reserved_calls + :reserved_calls, reserved_busy_us = reserved_busy_us + :reserved_busy_us
FROM locked WHERE b.run = locked.run

-- name: reserve
INSERT INTO perdure_reserved AS r (run, usd_micros, tokens, calls, busy_us) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (run) DO UPDATE SET usd_micros = r.usd_micros + excluded.usd_micros, tokens = r.tokens + excluded.tokens,
    calls = r.calls + excluded.calls, busy_us = r.busy_us + excluded.busy_us

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
-- Of the runs under this budget, those that stand still for want of one, each with its last word about that.
WITH RECURSIVE below (run) AS (
    SELECT id FROM perdure_runs WHERE run_id = ?
    UNION
    SELECT b.run FROM perdure_budgets AS b JOIN below ON b.above = below.run
)
SELECT r.run_id, (
    SELECT convert_to(e.data, 'UTF8') FROM perdure_events AS e
    WHERE e.run = r.id AND starts_with(e.data, '{"type":"budget_exceeded"') ORDER BY e.seq DESC LIMIT 1)
FROM below JOIN perdure_runs AS r ON r.ledger = below.run
WHERE r.status = 'needs_attention' AND r.attention = 'budget'
ORDER BY r.id

-- name: attempts_told
-- The beginnings, ends and settlements of attempts, by runs and in order, from a place on. Not by e.type, which is for people:
-- a role that may read the table may not be allowed to call a function.
SELECT r.id, e.seq, r.run_id, r.agent, r.tenant, e.call, kind.of_event, e.ts, convert_to(e.data, 'UTF8')
FROM perdure_runs AS r JOIN perdure_events AS e ON e.run = r.id CROSS JOIN LATERAL (SELECT split_part(left(e.data, 100), '"', 4)) AS kind (of_event)
WHERE (e.run, e.seq) > (:run::bigint, :seq::bigint) AND r.updated_at >= :since AND (:tenant::text IS NULL OR r.tenant = :tenant)
    AND kind.of_event IN ('tool_call_initiated', 'tool_call_completed', 'tool_call_failed', 'tool_call_in_doubt',
        'tool_call_resolved', 'model_call_initiated', 'model_call_completed', 'model_call_failed', 'run_cancelled')
ORDER BY e.run, e.seq LIMIT :limit

-- == Notices ==========================================================================================================

-- name: insert_notice
INSERT INTO perdure_notices (run, seq, next_at) VALUES (?, ?, ?)

-- name: due_notices
SELECT id, run, seq, attempts FROM perdure_notices WHERE next_at <= ? ORDER BY next_at, id LIMIT ?

-- name: notices_to_take
-- As due_notices, for one taker at a time: what another one is just taking is passed by.
SELECT id, run, seq, attempts FROM perdure_notices WHERE next_at <= ? ORDER BY next_at, id LIMIT ? FOR UPDATE SKIP LOCKED

-- name: take_notice
-- Until next_at it belongs to whoever has taken it.
UPDATE perdure_notices SET next_at = ?, attempts = attempts + 1 WHERE id = ?

-- name: notice
SELECT next_at, attempts FROM perdure_notices WHERE id = ?

-- name: event_of_notice
SELECT r.run_id, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, convert_to(e.data, 'UTF8')
FROM perdure_runs AS r JOIN perdure_events AS e ON e.run = r.id WHERE r.id = ? AND e.seq = ?

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
INSERT INTO perdure_lines (agent, version, queue, tenant, priority) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: kind_of_run
SELECT agent, queue, tenant, priority FROM perdure_runs WHERE id = ?

-- name: move_run
UPDATE perdure_runs SET version = ?, line = ? WHERE id = ?

-- name: lines_with_ready_runs
-- The served lines whose first run is ready, each with that and its tenant's last turn.
SELECT l.id, l.queue, l.tenant, l.priority, h.ready_at,
    coalesce((SELECT turn FROM perdure_turns AS t WHERE t.queue = l.queue AND t.tenant = l.tenant), 0)
FROM jsonb_array_elements(:served::jsonb) AS s (value)
    JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
    CROSS JOIN LATERAL (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at <= :now ORDER BY ready_at LIMIT 1) AS h
WHERE :queues::jsonb IS NULL OR l.queue IN (SELECT jsonb_array_elements_text(:queues::jsonb))

-- name: ready_below
-- The ready runs of a family; see family_of_run. Suspects only if they are wanted. What another worker is just taking is passed by.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE run_id > :run_id::text || '/' AND run_id < :run_id::text || '0' AND ready_at <= :now AND :queues::jsonb IS NULL
    AND (:suspects::boolean OR crashes + (lost > 0)::int < 2)
    AND EXISTS (SELECT 1 FROM jsonb_array_elements(:served::jsonb) AS s (value) WHERE s.value ->> 0 = agent AND s.value ->> 1 = version)
ORDER BY ready_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED

-- name: ready_of_line
-- The ready runs of a line from a place on, those that have waited longest first. Suspects only if they are wanted.
-- What another worker is just taking is passed by.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id
FROM perdure_runs
WHERE line = :line AND ready_at <= :now AND (ready_at, id) > (:after_ready::bigint, :after_id::bigint)
    AND (:suspects::boolean OR crashes + (lost > 0)::int < 2)
ORDER BY ready_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED

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
SELECT l.queue, l.tenant, sum(h.held)::bigint
FROM (SELECT line, count(*) AS held FROM perdure_runs WHERE holder IS NOT NULL GROUP BY line) AS h
    JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: ready_by_party
-- How many runs of each tenant in each queue are ready, and since when the one of them that has waited longest.
SELECT l.queue, l.tenant, sum(h.ready)::bigint, min(h.since)
FROM (SELECT line, count(*) AS ready, min(ready_at) AS since FROM perdure_runs WHERE ready_at <= :now GROUP BY line) AS h
    JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: newest_turn
SELECT coalesce(max(turn), 0) FROM perdure_turns

-- name: had_turn
-- Whose turn it was is told by whoever gets to it: nobody waits for another worker that writes down the same at the same moment.
WITH free AS (
    SELECT queue, tenant FROM perdure_turns WHERE queue = ?1 AND tenant = ?2 FOR NO KEY UPDATE SKIP LOCKED
), kept AS (
    UPDATE perdure_turns AS t SET turn = greatest(turn, ?3::bigint) FROM free WHERE t.queue = free.queue AND t.tenant = free.tenant
)
INSERT INTO perdure_turns (queue, tenant, turn) VALUES (?1, ?2, ?3) ON CONFLICT (queue, tenant) DO NOTHING

-- name: claim_run
-- A new epoch over the old one: whoever held the run before is refused from here on.
UPDATE perdure_runs SET epoch = :epoch, nonce = :nonce, holder = :worker, seq = :seq, head = :head, crashes = :crashes, lost_with = :lost_with,
    lost = 0, ready_at = NULL, waiting_for = NULL, error = NULL, attention = NULL, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'running' END
WHERE id = :id

-- name: claim_at_once
-- The first ready runs of the only served line that has any, taken in one statement, which is one transaction and one round trip: as
-- claim_run, insert_event and had_turn. The first columns of every row say what there was: how many such runs, whether something has to be
-- weighed (then nothing is taken), and when the next run of any served line is ready. A row with a run is one that was taken. The others
-- have its number alone, and an event of its journal, unless that is long, or what lies in its inbox: both are of the seq at which it was
-- taken, and while nobody holds a run nothing is put into its inbox.
-- What somebody else is just taking, or has changed since this statement began, is passed by; nothing is waited for. The seq is guard enough:
-- nobody takes a ready run, stops it or ends it without an event. The chain is that of perdure.core.identity.link. Nonces and event ids are
-- made of a secret of this claim. Whoever wants to know for certain what it has taken asks for the same advisory lock.
WITH served AS (
    SELECT l.id, l.queue, l.tenant, EXISTS (SELECT 1 FROM perdure_runs WHERE line = l.id AND ready_at <= :now::bigint) AS ready,
        (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at > :now ORDER BY ready_at LIMIT 1) AS later
    FROM jsonb_array_elements(:served::jsonb) AS s (value)
        JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
    WHERE :queues::jsonb IS NULL OR l.queue IN (SELECT jsonb_array_elements_text(:queues::jsonb))
), head AS (
    SELECT min(id) FILTER (WHERE ready) AS line, count(*) FILTER (WHERE ready) AS lines, min(queue) FILTER (WHERE ready) AS queue,
        min(tenant) FILTER (WHERE ready) AS tenant, min(later) AS later
    FROM served
), chosen AS MATERIALIZED (
    SELECT line, queue, tenant FROM head
    WHERE lines = 1 AND queue NOT IN (SELECT jsonb_array_elements_text(:limited::jsonb))
        AND EXISTS (SELECT 1 FROM perdure_workers WHERE worker = :worker AND name = :name::text)
        AND pg_try_advisory_xact_lock_shared(:token::bigint)
), first AS MATERIALIZED (
    SELECT r.id, r.seq, r.lost > 0 OR r.crashes >= :suspect::bigint AS is_suspect FROM chosen CROSS JOIN LATERAL (
        SELECT id, seq, lost, crashes FROM perdure_runs WHERE line = chosen.line AND ready_at <= :now ORDER BY ready_at, id LIMIT :limit
    ) AS r
), seen AS MATERIALIZED (
    SELECT count(*) AS runs, coalesce(bool_or(is_suspect), FALSE) OR NOT EXISTS (SELECT 1 FROM perdure_workers WHERE worker = :worker AND name = :name)
        OR (SELECT lines > 0 FROM head) AND NOT EXISTS (SELECT 1 FROM chosen) AS to_be_weighed
    FROM first
), free AS (
    SELECT r.id, r.seq, r.epoch, r.head FROM first AS f JOIN perdure_runs AS r ON r.id = f.id
    WHERE r.seq = f.seq AND NOT (SELECT to_be_weighed FROM seen) ORDER BY r.id FOR NO KEY UPDATE OF r SKIP LOCKED
), sealed AS (
    SELECT f.id, f.seq, f.epoch + 1 AS epoch, e.event_id, substr(sha256(:secret::bytea || int8send(f.id)), 1, 16) AS nonce,
        sha256(f.head || convert_to(concat(f.seq + 1, '|', encode(e.event_id, 'hex'), '|', :now, '|', f.epoch + 1, '||', f.seq, '|', :data::text), 'UTF8')) AS hash
    FROM free AS f CROSS JOIN LATERAL (SELECT substr(sha256(int8send(f.id) || :secret), 1, 16) AS event_id) AS e
), taken AS (
    UPDATE perdure_runs AS r SET epoch = s.epoch, nonce = s.nonce, holder = :worker::text, seq = s.seq + 1, head = s.hash,
        ready_at = NULL, waiting_for = NULL, error = NULL, attention = NULL, updated_at = greatest(r.updated_at, :now),
        status = CASE WHEN r.status = 'cancelling' THEN r.status ELSE 'running' END
    FROM sealed AS s WHERE r.id = s.id
    RETURNING r.run_id, r.agent, r.version, r.tenant, r.actor, r.queue, r.target, r.input_digest, r.status, r.waiting_for, r.ready_at,
        r.seq, r.head, r.epoch, r.holder, r.crashes, r.error, r.created_at, r.updated_at, r.priority, r.attention, r.parent, r.parent_call,
        r.lost, r.lost_with, r.id, r.nonce, s.event_id
), written AS (
    INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash)
    SELECT s.id, s.seq + 1, s.event_id, :now, s.epoch, NULL, s.seq, :data, s.hash FROM sealed AS s JOIN taken AS t ON t.id = s.id
), turn AS (
    SELECT coalesce(max(turn), 0) + (SELECT count(*) FROM taken) AS turn FROM perdure_turns HAVING EXISTS (SELECT 1 FROM taken)
), last AS (
    SELECT t.queue, t.tenant FROM perdure_turns AS t, chosen WHERE t.queue = chosen.queue AND t.tenant = chosen.tenant
    FOR NO KEY UPDATE OF t SKIP LOCKED
), kept AS (
    UPDATE perdure_turns AS t SET turn = greatest(t.turn, turn.turn) FROM last, turn WHERE t.queue = last.queue AND t.tenant = last.tenant
), noted AS (
    INSERT INTO perdure_turns (queue, tenant, turn) SELECT queue, tenant, turn FROM chosen, turn ON CONFLICT (queue, tenant) DO NOTHING
)
SELECT seen.runs, seen.to_be_weighed, head.later, t.*, NULL::bigint, NULL::bytea, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint,
    NULL::bytea, NULL::bigint
FROM seen CROSS JOIN head LEFT JOIN taken AS t ON TRUE
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, t.id, NULL, NULL, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, convert_to(e.data, 'UTF8'), NULL
FROM taken AS t JOIN perdure_events AS e ON e.run = t.id AND t.seq <= :few::bigint
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, t.id, NULL, NULL, NULL, i.event_id, i.ts, NULL, i.call, NULL, convert_to(i.data, 'UTF8'), i.id
FROM taken AS t JOIN perdure_inbox AS i ON i.run = t.id

-- name: claimed_at_once
-- What a claim with this secret has taken, if that is over.
SELECT run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at,
    seq, head, epoch, holder, crashes, error, created_at, updated_at, priority, attention, parent, parent_call, lost, lost_with, id, nonce
FROM perdure_runs WHERE holder = :worker AND nonce = substr(sha256(:secret::bytea || int8send(id)), 1, 16) ORDER BY id

-- name: claim_is_over
-- Waits for the end of a claim that takes this lock, should it be under way; one that comes while this transaction lasts takes nothing.
SELECT pg_advisory_xact_lock(:token::bigint)

-- name: next_ready
-- The head of each served line, whether it is ready or sleeps.
SELECT min(h.ready_at)
FROM jsonb_array_elements(:served::jsonb) AS s (value)
    JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
    CROSS JOIN LATERAL (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1) AS h
WHERE :queues::jsonb IS NULL OR l.queue IN (SELECT jsonb_array_elements_text(:queues::jsonb))

-- name: left_behind
-- From ready children in lines that are not served upwards, until a parent is of a kind that is: that one can name the kind below it.
WITH RECURSIVE served (agent, version) AS (SELECT value ->> 0, value ->> 1 FROM jsonb_array_elements(:served::jsonb) AS s (value)),
below (agent, version, parent) AS (
    SELECT l.agent, l.version, c.parent
    FROM perdure_lines AS l JOIN perdure_runs AS c ON c.line = l.id AND c.ready_at <= :now AND c.parent IS NOT NULL
    WHERE NOT EXISTS (SELECT 1 FROM served AS s WHERE s.agent = l.agent AND s.version = l.version)
    UNION
    SELECT p.agent, p.version, p.parent FROM below JOIN perdure_runs AS p ON p.run_id = below.parent
    WHERE p.parent IS NOT NULL AND NOT EXISTS (SELECT 1 FROM served AS s WHERE s.agent = p.agent AND s.version = p.version)
)
SELECT p.agent, p.version, below.agent, below.version, min(p.run_id)
FROM below JOIN perdure_runs AS p ON p.run_id = below.parent
WHERE EXISTS (SELECT 1 FROM served AS s WHERE s.agent = p.agent AND s.version = p.version)
    AND p.run_id NOT IN (SELECT jsonb_array_elements_text(:but::jsonb))
GROUP BY 1, 2, 3, 4

-- name: insert_worker
-- Again for the same worker: what it serves now. Its lease counts by the clock of the database.
INSERT INTO perdure_workers AS w (worker, name, pid, started_at, beat_at, serves, queues)
VALUES (:worker, :name, :pid, :now, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, :served, :queues)
ON CONFLICT (worker) DO UPDATE SET name = excluded.name, pid = excluded.pid, beat_at = excluded.beat_at, serves = excluded.serves,
    queues = excluded.queues, started_at = CASE WHEN w.pid = excluded.pid THEN w.started_at ELSE excluded.started_at END

-- name: delete_worker
DELETE FROM perdure_workers WHERE worker = ?

-- name: beat
-- Whatever the last one said: a clock that was set back must not keep a worker alive that has died since.
UPDATE perdure_workers SET beat_at = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
WHERE worker = :worker AND :now::bigint IS NOT NULL

-- name: worker_by_id
SELECT name, beat_at FROM perdure_workers WHERE worker = ?

-- name: list_workers
-- The last column: whether its lease has run out, by the clock of the database. What is held is counted once for all of them.
SELECT w.worker, w.name, w.pid, w.started_at, w.beat_at, coalesce(h.runs, 0), w.serves, w.queues,
    w.beat_at < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - :lease_us::bigint AND :now::bigint IS NOT NULL
FROM perdure_workers AS w LEFT JOIN (
    SELECT holder, count(*) AS runs FROM perdure_runs WHERE holder IS NOT NULL GROUP BY holder
) AS h ON h.holder = w.worker
ORDER BY w.started_at, w.worker

-- name: workers_without_session
-- Those whose connection, with the lock that it held, is gone: dead, or cut off for the moment. Only who holds a run has something to lose.
SELECT w.worker, w.beat_at FROM perdure_workers AS w
WHERE w.session AND EXISTS (SELECT 1 FROM perdure_runs AS r WHERE r.holder = w.worker) AND NOT EXISTS (
    SELECT 1 FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended(current_schema() || ' ' || w.worker, 0))

-- name: has_session
UPDATE perdure_workers SET session = TRUE WHERE worker = ?

-- name: has_no_session
-- Its connection is gone, and it lives: only its lease counts until it has another one.
UPDATE perdure_workers SET session = FALSE, beat_at = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint WHERE worker = ?

-- name: forget_workers
-- Those that have been silent for very long and hold nothing: their machines are gone.
DELETE FROM perdure_workers AS w
WHERE beat_at < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - :silent_us::bigint
    AND NOT EXISTS (SELECT 1 FROM perdure_runs AS r WHERE r.holder = w.worker)

-- name: holders_without_worker
SELECT DISTINCT holder FROM perdure_runs AS r
WHERE holder IS NOT NULL AND NOT EXISTS (SELECT 1 FROM perdure_workers AS w WHERE w.worker = r.holder)

-- name: lose_runs
-- Their holder is gone: claimable at once, and the next claim knows that it is a takeover, and how many others may be to blame.
-- What somebody is just writing to is passed by; the next look finds it.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now::bigint, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'queued' END,
    lost_with = CASE WHEN crashes >= 2 THEN :beside_suspects::bigint ELSE :beside::bigint END
WHERE id IN (SELECT id FROM perdure_runs WHERE holder = :worker ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)

-- name: held_by_worker
SELECT run_id, epoch FROM perdure_runs WHERE holder = ?

-- name: lose_run
-- As lose_runs, for one of them, unless it was claimed anew since we looked.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now::bigint, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'queued' END,
    lost_with = CASE WHEN crashes >= 2 THEN :beside_suspects::bigint ELSE :beside::bigint END
WHERE run_id = :run_id AND holder = :worker AND epoch = :epoch

-- name: lose_runs_of_silent_worker
-- As lose_runs, unless the worker has given another sign of life since.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now::bigint, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'queued' END,
    lost_with = CASE WHEN crashes >= 2 THEN :beside_suspects::bigint ELSE :beside::bigint END
WHERE id IN (SELECT id FROM perdure_runs WHERE holder = :worker ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)
    AND EXISTS (SELECT 1 FROM perdure_workers AS w WHERE w.worker = :worker AND w.beat_at = :beat_at)

-- name: count_workers
-- How many there are whose lease runs, and how many that have been silent for very long and hold nothing.
SELECT count(*) FILTER (WHERE w.beat_at >= (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - :lease_us::bigint),
    count(*) FILTER (WHERE w.beat_at < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - :silent_us::bigint
        AND NOT EXISTS (SELECT 1 FROM perdure_runs AS r WHERE r.holder = w.worker))
FROM perdure_workers AS w

-- == Rates ============================================================================================================

-- name: rate
SELECT due, paused_until, seen_at FROM perdure_rates WHERE key = ?

-- name: make_rate
-- So that there is a row to lock, and of all who come for a place one goes first.
INSERT INTO perdure_rates (key, due, paused_until, seen_at) VALUES (?, 0, 0, 0) ON CONFLICT DO NOTHING

-- name: rate_to_change
SELECT due, paused_until, seen_at FROM perdure_rates WHERE key = ? FOR NO KEY UPDATE

-- name: book_rate
INSERT INTO perdure_rates (key, due, paused_until, seen_at) VALUES (:key, :due, :paused_until, :seen_at)
ON CONFLICT (key) DO UPDATE SET due = excluded.due, paused_until = excluded.paused_until, seen_at = excluded.seen_at

-- name: hold_rate_back
INSERT INTO perdure_rates AS r (key, due, paused_until, seen_at) VALUES (:key, 0, :until, 0)
ON CONFLICT (key) DO UPDATE SET paused_until = greatest(r.paused_until, excluded.paused_until)

-- == What one transaction at a time may do ============================================================================

-- name: make_lock
INSERT INTO perdure_locks (key) VALUES (?) ON CONFLICT DO NOTHING

-- name: take_lock
SELECT 1 FROM perdure_locks WHERE key = ? FOR UPDATE

-- == Moving, pruning ==================================================================================================

-- name: moved
SELECT state, to_url, by, at FROM perdure_moved

-- name: lock_journal
-- Waits for every transaction that is writing to a run, and keeps others from beginning: what comes after this one finds the journal closed.
LOCK TABLE perdure_runs IN EXCLUSIVE MODE

-- name: lock_workers
LOCK TABLE perdure_workers IN SHARE ROW EXCLUSIVE MODE

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
SELECT relname::text FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition AND left(relname, 8) <> 'perdure_'
ORDER BY 1

-- name: roots
-- Those that stand above a family, in the order of their numbers.
SELECT id, run_id FROM perdure_runs WHERE id > :after AND strpos(run_id, '/') = 0 ORDER BY id LIMIT :limit

-- name: families
-- All runs of these families; see family_of_run.
SELECT root.value, r.run_id, r.id, r.seq, r.head, r.status, r.updated_at
FROM jsonb_array_elements_text(:roots::jsonb) AS root (value) JOIN perdure_runs AS r ON r.run_id = root.value
UNION ALL
SELECT root.value, r.run_id, r.id, r.seq, r.head, r.status, r.updated_at
FROM jsonb_array_elements_text(:roots::jsonb) AS root (value) JOIN perdure_runs AS r ON r.run_id > root.value || '/' AND r.run_id < root.value || '0'
ORDER BY 3

-- name: heads
SELECT run_id, seq, head FROM perdure_runs WHERE run_id = ANY (ARRAY(SELECT jsonb_array_elements_text(:run_ids::jsonb)))

-- name: pruned_heads
SELECT run_id, events, head FROM perdure_pruned WHERE run_id = ANY (ARRAY(SELECT jsonb_array_elements_text(:run_ids::jsonb))) AND status <> 'returned'

-- name: whole_runs
-- Everything but what is this database's own affair: numbers, and who held it. The last column: whose budget applies first.
SELECT id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes,
    error, created_at, updated_at, priority, attention, parent, parent_call, parent_seq, depth, lost_with,
    (SELECT l.run_id FROM perdure_runs AS l WHERE l.id = r.ledger)
FROM perdure_runs AS r WHERE run_id = ANY (ARRAY(SELECT jsonb_array_elements_text(:run_ids::jsonb))) ORDER BY id

-- name: whole_events
SELECT e.run, e.seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8'), hash
FROM perdure_events AS e WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) ORDER BY run, seq

-- name: whole_approvals
SELECT run, approval, seq, call, action, asked_at, status, deciders, expires_at, escalated, voters, digest, settled_by, note, settled_at
FROM perdure_approvals WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) ORDER BY id

-- name: whole_signals
SELECT run, topic, key FROM perdure_signals WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))
ORDER BY run, topic, key

-- name: whole_budgets
-- The first columns: whose it is, and whose the one above it is.
SELECT b.run, (SELECT r.run_id FROM perdure_runs AS r WHERE r.id = b.above), limit_usd_micros, limit_tokens, limit_calls, limit_busy_us,
    on_exceed, spent_usd_micros, spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us
FROM perdure_budgets AS b WHERE b.run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: whole_reserved
SELECT run, usd_micros, tokens, calls, busy_us FROM perdure_reserved WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: whole_inbox
SELECT run, call, event_id, ts, convert_to(data, 'UTF8') FROM perdure_inbox WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) ORDER BY id

-- name: whole_notices
SELECT run, seq, next_at, attempts, error FROM perdure_notices WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) ORDER BY id

-- name: whole_blob_uses
SELECT run, digest FROM perdure_blob_uses WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))
ORDER BY run, digest

-- name: take_in_run
-- A run from another journal, with the time of its next wake-up and everything else. No row when the id is taken.
INSERT INTO perdure_runs (run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes, error,
    created_at, updated_at, priority, attention, parent, parent_call, parent_seq, depth, lost_with, line, ledger)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT ledger FROM perdure_runs WHERE run_id = ?::text))
ON CONFLICT (run_id) DO NOTHING RETURNING id

-- name: take_in_events
-- Those of many runs.
INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash)
SELECT e.* FROM unnest(:runs::bigint[], :seqs::bigint[], :ids::bytea[], :times::bigint[], :epochs::bigint[], :calls::bigint[],
    :causes::bigint[], :data::text[], :hashes::bytea[]) AS e (run, seq, event_id, ts, epoch, call, cause, data, hash)

-- name: take_in_approval
INSERT INTO perdure_approvals (run, approval, seq, call, action, asked_at, status, deciders, expires_at, escalated, voters, digest, settled_by,
    note, settled_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: take_in_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed, spent_usd_micros,
    spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us)
VALUES (?, (SELECT id FROM perdure_runs WHERE run_id = ?::text), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: take_in_inbox
INSERT INTO perdure_inbox (run, call, event_id, ts, data) VALUES (?, ?, ?, ?, ?)

-- name: take_in_notice
INSERT INTO perdure_notices (run, seq, next_at, attempts, error) VALUES (?, ?, ?, ?, ?)

-- name: use_blob
INSERT INTO perdure_blob_uses (run, digest) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: known_blobs
SELECT digest FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value)))

-- name: rates
SELECT key, due, paused_until, seen_at FROM perdure_rates

-- name: run_to_keep
-- For whoever adds to its family: it is not pruned before this transaction ends.
SELECT id FROM perdure_runs WHERE run_id = ? FOR KEY SHARE

-- name: prunable
-- Families whose root has ended so and of which nothing has happened since: how many runs and events they have.
SELECT r.id, r.run_id,
    1 + (SELECT count(*) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0')::bigint,
    (r.seq + (SELECT coalesce(sum(k.seq), 0) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'))::bigint
FROM perdure_runs AS r
WHERE r.id > :after AND strpos(r.run_id, '/') = 0 AND r.status = ANY (ARRAY(SELECT jsonb_array_elements_text(:statuses::jsonb))) AND r.updated_at < :before
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'
            AND (k.status NOT IN ('succeeded', 'failed', 'cancelled') OR k.updated_at >= :before))
    AND NOT EXISTS (SELECT 1 FROM perdure_notices AS n WHERE n.run = r.id)
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k JOIN perdure_notices AS n ON n.run = k.id
        WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0')
ORDER BY r.id LIMIT :limit

-- name: runs_to_prune
-- Nobody else touches them, or adds to their families, before this transaction ends.
SELECT id FROM perdure_runs WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))
ORDER BY id FOR UPDATE

-- name: unsent_notices
-- The runs of which somebody still has to hear.
SELECT DISTINCT run FROM perdure_notices WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: bury
INSERT INTO perdure_pruned (number, run_id, agent, tenant, status, events, head, created_at, finished_at, pruned_at, by)
SELECT id, run_id, agent, tenant, coalesce(:status::text, status), seq, head, created_at, updated_at, :now::bigint, :by::text
FROM perdure_runs WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_notices
DELETE FROM perdure_notices WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_inbox
DELETE FROM perdure_inbox WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_signals
DELETE FROM perdure_signals WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_reserved
DELETE FROM perdure_reserved WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_approvals
DELETE FROM perdure_approvals WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_budgets
DELETE FROM perdure_budgets WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_blob_uses
DELETE FROM perdure_blob_uses WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_events
DELETE FROM perdure_events WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_runs
DELETE FROM perdure_runs WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: blobs_to_prune
-- Locked before it is looked at who uses them: whoever is just putting one of them there again has it locked until then, and is seen.
SELECT digest FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value))) ORDER BY digest FOR UPDATE

-- name: prune_blobs
DELETE FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value)))
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

-- name: migrating
-- Of several processes that start at once, one makes the schema. For this transaction only: nothing is left behind in a session.
SELECT pg_advisory_xact_lock(hashtextextended('perdure schema ' || current_schema(), 0))

-- name: has_schema_table
-- Not to_regclass: it would answer from what this session remembers of its first look, before it waited for whoever was migrating.
SELECT 1 FROM pg_class WHERE relname = 'perdure_schema' AND relnamespace = current_schema()::regnamespace

-- name: applied_migrations
SELECT version::bigint, checksum FROM perdure_schema ORDER BY version

-- name: record_migration
INSERT INTO perdure_schema (version, checksum, applied_at) VALUES (?, ?, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: facts
-- Connections are not counted in pg_stat_activity: there one sees only those of one's own user.
SELECT current_setting('server_version'), pg_size_pretty(pg_database_size(current_database())), current_setting('fsync'),
    current_setting('synchronous_commit'), current_setting('max_connections'),
    (SELECT coalesce(sum(numbackends), 0)::bigint FROM pg_stat_database)

-- == What doctor asks ==================================================================================================

-- name: durability
SELECT name, setting FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'autovacuum', 'track_counts')

-- name: dead_rows
-- What autovacuum has not cleared away yet, of the tables in which rows are changed all the time.
SELECT relname::text, n_live_tup, n_dead_tup, (extract(epoch FROM greatest(last_vacuum, last_autovacuum)) * 1000000)::bigint
FROM pg_stat_user_tables
WHERE schemaname = current_schema() AND relname IN ('perdure_runs', 'perdure_workers', 'perdure_inbox', 'perdure_budgets')
ORDER BY n_dead_tup DESC

-- name: oldest_transaction
-- The one that has been open longest: as long as it is, no vacuum clears away what was changed since. Of other users one sees only that they
-- are there, unless one is a member of pg_read_all_stats.
SELECT pid::bigint, coalesce(application_name, ''), coalesce(state, ''), (extract(epoch FROM clock_timestamp() - xact_start) * 1000000)::bigint
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
ORDER BY xact_start LIMIT 1

-- name: missing_privileges
-- What a worker needs, or who decides, and this user may not do. The journal itself is only ever added to. UPDATE is a matter of columns;
-- of a table whose rows are only locked it takes a single one.
SELECT t.role, t.name, p.privilege
FROM (VALUES ('worker', 'perdure_schema', 'SELECT', ''), ('worker', 'perdure_moved', 'SELECT', ''), ('worker', 'perdure_pruned', 'SELECT', ''),
        ('worker', 'perdure_events', 'SELECT, INSERT', ''), ('worker', 'perdure_blobs', 'SELECT, INSERT, UPDATE', 'digest'),
        ('worker', 'perdure_blob_uses', 'SELECT, INSERT', ''), ('worker', 'perdure_lines', 'SELECT, INSERT', ''),
        ('worker', 'perdure_signals', 'SELECT, INSERT', ''),
        ('worker', 'perdure_runs', 'SELECT, INSERT, UPDATE', 'version, status, waiting_for, ready_at, seq, head, epoch, nonce, holder, lost, '
            'lost_with, crashes, error, updated_at, attention, ledger, line'),
        ('worker', 'perdure_approvals', 'SELECT, INSERT, UPDATE', 'status, deciders, expires_at, escalated, voters, digest, settled_by, note, '
            'settled_at'),
        ('worker', 'perdure_budgets', 'SELECT, INSERT, UPDATE', 'limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, spent_usd_micros, '
            'spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us'),
        ('worker', 'perdure_turns', 'SELECT, INSERT, UPDATE', 'turn'),
        ('worker', 'perdure_rates', 'SELECT, INSERT, UPDATE', 'due, paused_until, seen_at'),
        ('worker', 'perdure_locks', 'SELECT, INSERT, UPDATE', 'key'), ('worker', 'perdure_inbox', 'SELECT, INSERT, DELETE', ''),
        ('worker', 'perdure_notices', 'SELECT, INSERT, UPDATE, DELETE', 'next_at, attempts, error'),
        ('worker', 'perdure_workers', 'SELECT, INSERT, UPDATE, DELETE', 'name, pid, started_at, beat_at, serves, queues, session'),
        ('worker', 'perdure_reserved', 'SELECT, INSERT, UPDATE, DELETE', 'usd_micros, tokens, calls, busy_us'),
        ('decider', 'perdure_events', 'INSERT', ''), ('decider', 'perdure_inbox', 'INSERT, DELETE', ''),
        ('decider', 'perdure_blobs', 'INSERT, UPDATE', 'digest'), ('decider', 'perdure_blob_uses', 'INSERT', ''),
        ('decider', 'perdure_notices', 'INSERT', ''),
        ('decider', 'perdure_runs', 'UPDATE', 'status, waiting_for, attention, ready_at, seq, head, updated_at, holder, nonce, lost, '
            'lost_with'),
        ('decider', 'perdure_approvals', 'UPDATE', 'status, deciders, expires_at, escalated, voters, digest, settled_by, note, settled_at')
    ) AS t (role, name, needed, columns), LATERAL unnest(string_to_array(t.needed, ', ')) AS p (privilege)
WHERE CASE WHEN p.privilege <> 'UPDATE' THEN NOT has_table_privilege(format('%I.%I', current_schema(), t.name), p.privilege)
    ELSE EXISTS (
        SELECT 1 FROM pg_attribute AS a WHERE a.attrelid = format('%I.%I', current_schema(), t.name)::regclass
            AND a.attname = ANY (string_to_array(t.columns, ', ')) AND NOT has_column_privilege(a.attrelid, a.attnum, 'UPDATE')) END
ORDER BY 1, 2, 3
