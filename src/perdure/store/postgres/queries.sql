-- The statements that only PostgreSQL gets, by name; common.sql has the others. If SQLite has a statement of the same
-- name, it has the same parameters. Values are passed as parameters only; no statement is ever assembled from data.
--
-- What differs from SQLite: there are several writers at a time. So a transaction locks the rows that it reads in
-- order to change them (FOR NO KEY UPDATE; several runs always in ascending order of their keys). Claims skip rows
-- that other transactions have locked (SKIP LOCKED). Leases are judged by the clock of the database.

-- == The append path =================================================================================================

-- name: advance
-- The guard: exactly one row changes. If no row changes, another worker has the run, or the run's seq has changed.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint)
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_project
-- The guard, and the new projection. `holder` and `ready_at` are not set, so their indexes do not change.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint),
    status = ?9, waiting_for = ?10, error = ?11, crashes = CASE WHEN ?12 THEN 0 ELSE crashes END, attention = ?13
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_release
-- The guard, and the holder releases the run. Any worker may claim the run from ready_at on; if ready_at is NULL, no
-- worker may.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint),
    status = ?9, waiting_for = ?10, error = ?11, crashes = CASE WHEN ?12 THEN 0 ELSE crashes END, attention = ?13, ready_at = ?14,
    holder = NULL, nonce = NULL
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8

-- name: advance_and_park
-- Like advance_and_release; it is sent right after lock_to_release. ?16 are the inbox rows that the holder has seen.
-- If the inbox has another row, the run is ready at ?15.
UPDATE perdure_runs SET seq = ?1, head = coalesce(?2::bytea, head), updated_at = greatest(updated_at, ?3::bigint),
    status = ?9, waiting_for = ?10, error = ?11, crashes = CASE WHEN ?12 THEN 0 ELSE crashes END, attention = ?13, holder = NULL, nonce = NULL,
    ready_at = CASE WHEN ?15::bigint IS NOT NULL AND EXISTS (SELECT 1 FROM perdure_inbox AS i WHERE i.run = ?4 AND i.id <> ALL (?16::bigint[]))
        THEN ?15 ELSE ?14::bigint END
WHERE id = ?4 AND epoch = ?5 AND nonce = ?6 AND holder = ?7 AND seq = ?8 AND current_setting('transaction_isolation') = 'read committed'

-- name: lock_runs
-- For appends with consequences, and for releases. Lock these runs, and the parents of the runs that end, in the order
-- in which every transaction locks. Read the inbox after this statement: before the lock it could still change.
SELECT id FROM perdure_runs
WHERE id = ANY (:keys::bigint[]) OR run_id = ANY (ARRAY(SELECT r.parent FROM perdure_runs AS r WHERE r.id = ANY (:ending::bigint[])))
ORDER BY id FOR NO KEY UPDATE

-- name: lock_budgets
-- For appends that charge. Lock all budgets that these appends charge, in the order in which every transaction locks.
WITH RECURSIVE applies (run) AS (
    SELECT ledger FROM perdure_runs WHERE id = ANY (:keys::bigint[])
    UNION
    SELECT b.above FROM perdure_budgets AS b JOIN applies ON b.run = applies.run
)
SELECT run FROM perdure_budgets WHERE run IN (SELECT run FROM applies) ORDER BY run FOR NO KEY UPDATE

-- name: fence
-- For an append whose answer was lost. If that append is under way, this statement waits for it at the row lock. If
-- that append comes later, the new nonce makes the server refuse it. :nonces are all nonces that this lease may have.
-- The epoch stays, since the same worker continues.
UPDATE perdure_runs SET nonce = :nonce WHERE id = :id AND epoch = :epoch AND holder = :worker AND nonce = ANY (:nonces::bytea[])

-- name: lock_to_release
-- Lock the runs that are released. This is sent right before append_many or advance_and_park, in the same transaction:
-- so the next statement sees every post to these runs. NOWAIT: do not wait for a locked row. In an isolation level
-- above READ COMMITTED, both statements would see the same snapshot; then append_many leaves such runs to the common
-- path.
SELECT id FROM perdure_runs WHERE id = ANY (:keys::bigint[]) ORDER BY id FOR NO KEY UPDATE NOWAIT

-- name: append_many
-- The guarded appends of many runs in one statement, which is one transaction and one round trip. Each append is
-- written only if its own guard holds. This is only for appends without other consequences. If a run is released, and
-- its inbox has a row that its holder has not seen, the run is ready at once; see lock_to_release.
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
-- The digests whose blobs exist. The blobs stay locked until this transaction has recorded which run uses them: no
-- prune can delete them before. With KEY SHARE, several transactions may store the same blob at once, and only a prune
-- waits. Like every row lock, it needs the UPDATE privilege.
SELECT digest FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value)))
ORDER BY digest FOR KEY SHARE

-- name: unread_inbox_of_run
-- Is there an inbox row that this commit does not record?
SELECT 1 FROM perdure_inbox WHERE run = ? AND id NOT IN (SELECT value::bigint FROM jsonb_array_elements_text(?::jsonb) AS v (value)) LIMIT 1

-- name: event_at
-- The code identifies the event by its hash, not by its event id: an event from the inbox has the same event id,
-- even if another worker appends it.
SELECT hash FROM perdure_events WHERE run = ? AND seq = ?

-- == Reading =========================================================================================================

-- name: ended
-- A part of other statements, in place of {ended}: the type of the run's last event if it is terminal, else NULL. If the
-- run's status is not one of a finished run, the row was edited, and nothing may be appended.
(SELECT CASE WHEN starts_with(e.data, '{"type":"run_succeeded"') THEN 'run_succeeded' WHEN starts_with(e.data, '{"type":"run_failed"') THEN 'run_failed'
    WHEN starts_with(e.data, '{"type":"run_cancelled"') THEN 'run_cancelled' END
FROM perdure_events AS e WHERE e.run = perdure_runs.id AND e.seq = perdure_runs.seq)

-- name: run_to_change
-- Like run_by_id, and the run stays locked until this transaction ends.
SELECT {run}, {ended}
FROM perdure_runs WHERE run_id = ? FOR NO KEY UPDATE

-- name: family_of_run
-- The unfinished runs below the run. A child's id is its parent's id, a slash and a number; '0' is the character after
-- '/'.
SELECT {run}
FROM perdure_runs
WHERE run_id > :run_id::text || '/' AND run_id < :run_id::text || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')

-- name: family_to_change
-- Like family_of_run, the oldest run first, and the runs stay locked until this transaction ends.
SELECT {run}, {ended}
FROM perdure_runs
WHERE run_id > :run_id::text || '/' AND run_id < :run_id::text || '0' AND status NOT IN ('succeeded', 'failed', 'cancelled')
ORDER BY id FOR NO KEY UPDATE

-- name: current_of_runs
-- What the row of a run does not say: its last status text, its failure, and its attempts under way (the last event of
-- the call is an intent, and the run is held).
SELECT r.run_id, e.ts, e.call, convert_to(e.data, 'UTF8')
FROM jsonb_array_elements_text(:runs::jsonb) AS w (run_id) JOIN perdure_runs AS r ON r.run_id = w.run_id CROSS JOIN LATERAL (
    (SELECT s.ts, s.call, s.data FROM perdure_events AS s
     WHERE s.run = r.id AND s.seq <= r.seq AND s.data LIKE '{"type":"status\_reported"%' ORDER BY s.seq DESC LIMIT 1)
    UNION ALL
    (SELECT f.ts, f.call, f.data FROM perdure_events AS f WHERE f.run = r.id AND f.seq = r.seq AND r.status = 'failed')
    UNION ALL
    (SELECT o.ts, o.call, o.data FROM (
        SELECT DISTINCT ON (c.call) c.ts, c.call, c.data FROM perdure_events AS c
        WHERE c.run = r.id AND c.seq <= r.seq AND c.call IS NOT NULL AND r.holder IS NOT NULL ORDER BY c.call, c.seq DESC) AS o
     WHERE o.data LIKE '{"type":"tool\_call\_initiated"%' OR o.data LIKE '{"type":"model\_call\_initiated"%')
) AS e

-- name: read_events
-- Read `data` as bytes: these are the very bytes that were hashed.
SELECT seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8')
FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND seq > :after AND seq <= coalesce(
    -- A page that begins in what was removed goes on behind it.
    (SELECT c.removed + :until::bigint - :after::bigint - (:after::bigint = 0)::int FROM perdure_checkpoints AS c
        JOIN perdure_runs AS r ON r.id = c.run WHERE r.run_id = :run_id AND c.removed > :after::bigint), :until::bigint)
ORDER BY seq

-- name: read_life
-- The run's first event, and the events from its last checkpoint on. Without a checkpoint: all its events.
SELECT seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8')
FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND seq = 1
UNION ALL
SELECT seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8')
FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id)
    AND seq >= (SELECT greatest(2, coalesce(max(c.seq), 0)) FROM perdure_checkpoints AS c
        WHERE c.run = (SELECT id FROM perdure_runs WHERE run_id = :run_id))
ORDER BY 1

-- name: read_events_of_runs
-- At most :limit events of each run. :after is a JSON object: run id → the seq of the last event that the reader has.
SELECT r.run_id, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, convert_to(e.data, 'UTF8')
FROM jsonb_each_text(:after::jsonb) AS w (run_id, after) JOIN perdure_runs AS r ON r.run_id = w.run_id
    LEFT JOIN perdure_checkpoints AS c ON c.run = r.id AND c.removed > w.after::bigint
    JOIN perdure_events AS e ON e.run = r.id AND e.seq > w.after::bigint
        AND e.seq <= :limit::bigint + coalesce(c.removed - (w.after::bigint = 0)::int, w.after::bigint)
ORDER BY e.run, e.seq

-- name: watched_runs
-- Each watched run; and the unfinished runs below the runs in :families. The last column is the watched run.
SELECT {run}, run_id FROM perdure_runs WHERE run_id = ANY (ARRAY(SELECT jsonb_array_elements_text(:run_ids::jsonb)))
UNION ALL
SELECT {run}, watched
FROM jsonb_array_elements_text(:families::jsonb) AS w (watched) JOIN perdure_runs ON run_id > watched || '/' AND run_id < watched || '0'
WHERE status NOT IN ('succeeded', 'failed', 'cancelled')

-- name: first_events
SELECT run, seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8')
FROM perdure_events WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(?::jsonb) AS v (value))) AND seq = 1

-- name: stored_events
SELECT seq, event_id, ts, epoch, call, cause, convert_to(data, 'UTF8'), hash
FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) ORDER BY seq

-- name: hash_at
SELECT hash FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = ?) AND seq = ?

-- name: hashes_of_run
SELECT hash FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND seq > :after AND seq <= :until ORDER BY seq

-- name: growing_runs
-- The new runs, the unfinished runs, and those that were reopened: see Reading.growing. A run gets its transaction number before its commit. So
-- a run is returned only if its transaction is older than all transactions that are under way: then no run with an
-- earlier place can appear later. After a restore into another server, a transaction number may be in the future; such
-- a run is old, and its place begins with 0. Two separate queries with conditions on plain columns let the index
-- return the rows in order.
SELECT {run}, commit
FROM (
    (SELECT r.*, 0::bigint AS commit FROM perdure_runs AS r
    WHERE born >= pg_snapshot_xmax(pg_current_snapshot()) AND :after_commit::bigint = 0 AND id > :after::bigint
        AND ((0, id) > (:newest_commit::bigint, :newest::bigint) OR status NOT IN ('succeeded', 'failed', 'cancelled') OR reopened > 0)
    ORDER BY id LIMIT :limit)
    UNION ALL
    (SELECT r.*, born::text::bigint AS commit FROM perdure_runs AS r
    WHERE born < pg_snapshot_xmin(pg_current_snapshot()) AND (born, id) > (:after_commit::bigint::text::xid8, :after::bigint)
        AND ((born, id) > (:newest_commit::bigint::text::xid8, :newest::bigint) OR status NOT IN ('succeeded', 'failed', 'cancelled')
            OR reopened > 0)
    ORDER BY born, id LIMIT :limit)
) AS settled
ORDER BY commit, id LIMIT :limit

-- name: journals_without_run
-- Jump from the first event of one journal to the first event of the next journal, so that long journals cost nothing.
WITH RECURSIVE journals (number) AS (
    SELECT min(run) FROM perdure_events
    UNION
    SELECT (SELECT min(run) FROM perdure_events WHERE run > number) FROM journals WHERE number IS NOT NULL
)
SELECT number, (SELECT count(*) FROM perdure_events WHERE run = number),
    (SELECT convert_to(data, 'UTF8') FROM perdure_events WHERE run = number AND seq = 1)
FROM journals WHERE number IS NOT NULL AND number NOT IN (SELECT id FROM perdure_runs)

-- name: chain_entries
SELECT chain, n, run, seq, head, run_id, link FROM perdure_chain WHERE (chain, n) > (:chain::bigint, :after::bigint) ORDER BY chain, n LIMIT :limit

-- name: chain_ends
SELECT DISTINCT ON (chain) chain, n, run, seq, head, run_id, link FROM perdure_chain WHERE link IS NOT NULL ORDER BY chain, n DESC

-- name: missing_heads
-- The runs that have lost an event: the chain has the event, the journal does not, and the run was not pruned. The
-- last two columns are the id and the last event of the run's row, if the row exists.
SELECT c.run, min(c.seq), max(c.seq), max(c.run_id), r.run_id, r.seq
FROM perdure_chain AS c LEFT JOIN perdure_runs AS r ON r.id = c.run LEFT JOIN perdure_events AS e ON e.run = c.run AND e.seq = c.seq
WHERE c.run > 0 AND (:run_id::text IS NULL OR r.run_id = :run_id) AND CASE WHEN r.id IS NULL THEN NOT EXISTS (SELECT 1 FROM perdure_pruned AS p WHERE p.number = c.run)
    ELSE r.seq < c.seq OR CASE WHEN e.run IS NOT NULL THEN substr(e.hash, 1, 16) <> c.head
        ELSE NOT EXISTS (SELECT 1 FROM perdure_checkpoints AS k WHERE k.run = c.run
            AND (c.seq > 1 AND c.seq < k.removed OR c.seq = k.removed AND substr(k.head, 1, 16) = c.head)) END END
GROUP BY c.run, r.run_id, r.seq ORDER BY c.run

-- name: unchained_runs
-- The runs without a holder whose last event is not in the chain. A run with one event is new, and has no entry yet.
SELECT run_id, seq FROM perdure_runs AS r
WHERE holder IS NULL AND seq > 1 AND (:run_id::text IS NULL OR run_id = :run_id)
    AND NOT EXISTS (SELECT 1 FROM perdure_chain AS c WHERE c.run = r.id AND c.seq = r.seq)
ORDER BY id

-- name: triggers
SELECT c.relname, t.tgname, pg_get_triggerdef(t.oid), t.tgenabled::text
FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
WHERE NOT t.tgisinternal AND c.relname LIKE 'perdure\_%' AND c.relnamespace = current_schema()::regnamespace ORDER BY 1, 2

-- name: indexes
-- The valid indexes: one that could not be built is not used.
SELECT t.relname, i.relname FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_class AS t ON t.oid = x.indrelid
WHERE x.indisvalid AND t.relname LIKE 'perdure\_%' AND t.relnamespace = current_schema()::regnamespace ORDER BY 1, 2

-- name: functions
SELECT proname, prosrc FROM pg_proc WHERE proname LIKE 'perdure\_%' AND pronamespace = current_schema()::regnamespace ORDER BY 1

-- == Creating and posting ============================================================================================

-- name: insert_run
-- A child is under its parent's budget, unless the child gets its own budget. No row is returned if the id is taken,
-- or belonged to a run that was pruned.
INSERT INTO perdure_runs (run_id, agent, version, tenant, actor, queue, target, input_digest, status, ready_at, seq, head, epoch,
    created_at, updated_at, priority, parent, parent_call, parent_seq, depth, line, ledger)
SELECT :run_id::text, :agent::text, :version::text, :tenant::text, :actor::text, :queue::text, :target::text, :input_digest::text, 'queued',
    :ready_at::bigint, 1, :head::bytea, 0, :ts::bigint, :ts, :priority::bigint, :parent::text, :parent_call::bigint, :parent_seq::bigint,
    :depth::bigint, :line::bigint, (SELECT ledger FROM perdure_runs WHERE run_id = :parent::text)
WHERE NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE run_id IN (:run_id::text, :root::text) AND status <> 'returned')
ON CONFLICT (run_id) DO NOTHING RETURNING id, ledger

-- name: create_run
-- Like insert_run and insert_event in one statement, for a run without parent, budget and blobs. No row is returned if
-- the run's line does not exist yet, if the id is taken, or if the id belonged to a pruned run; then insert_run finds
-- out which of these is true. The statement looks for the run and for its tombstone in one snapshot, which always has
-- one of the two, even during a prune. ON CONFLICT alone would wait for the end of the prune, and would find neither.
-- The last column: has this statement rung the bell? Listeners hear the bell at the commit. Transactions that ring
-- commit one after the other, and cannot share a flush of the disk. So only one transaction at a time rings inside its
-- statement, and only if its process has no other such statement under way. Every other transaction rings after its
-- commit, in a statement of its own.
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
    RETURNING {run}
), written AS (
    INSERT INTO perdure_events (run, seq, event_id, ts, epoch, data, hash)
    SELECT made.id, 1, :event_id::bytea, :ts, 0, :data::text, :head FROM made
)
SELECT made.*, CASE WHEN :alone::boolean AND pg_try_advisory_xact_lock(hashtextextended('perdure bell', 0)) THEN pg_notify(:channel, :ring)::text = '' ELSE FALSE END
FROM made

-- name: signal_at_once
-- Append a signal to the journal of a parked run, in one statement: like post_to_unheld, insert_event and
-- remember_signal. It may also ring the bell; the answer says whether it has (see create_run). No row is returned if
-- the run is not parked, has a row in its inbox, is locked, was changed since this statement began, has had this very
-- signal, or has ended and its row was edited. Then the common path finds out which of these is true. :once is the key of the signal; if the signal
-- has no key, it is the key that Mailbox.post stores for a signal whose answer was lost. The hash is computed as in
-- perdure.core.identity.link. `|| ''`: the run must be found by its id. By the index of statuses, each signal would read
-- all parked runs, if they were parked after the last ANALYZE.
WITH seen AS MATERIALIZED (
    SELECT r.id, r.seq FROM perdure_runs AS r
    WHERE r.run_id = :run_id AND r.holder IS NULL AND r.specimen IS NULL AND r.status || '' = ANY (:parked::text[])
        AND NOT EXISTS (SELECT 1 FROM perdure_inbox AS i WHERE i.run = r.id)
        AND (SELECT {ended} FROM perdure_runs WHERE perdure_runs.id = r.id) IS NULL
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
-- The run is not held, or its holder is dead, so the posted event goes into the journal.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = greatest(updated_at, :now::bigint), status = :status::text,
    waiting_for = :waiting_for, attention = CASE WHEN :status::text = 'needs_attention' THEN attention END, ready_at = :ready_at,
    holder = NULL, nonce = NULL, lost = CASE WHEN holder IS NULL THEN lost ELSE 2 END,
    lost_with = CASE WHEN holder IS NULL THEN lost_with ELSE :beside::bigint END
WHERE id = :id

-- name: end_unheld
-- Like post_to_unheld, for a terminal event.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = greatest(updated_at, :now::bigint), status = :status, waiting_for = NULL,
    attention = NULL, error = :error, crashes = 0, ready_at = NULL, holder = NULL, nonce = NULL
WHERE id = :id

-- name: reopen_run
-- Like post_to_unheld, for a run that a person has reopened, also after its end.
UPDATE perdure_runs SET seq = :seq, head = :head, updated_at = greatest(updated_at, :now::bigint), status = 'queued', waiting_for = NULL,
    attention = NULL, error = NULL, crashes = 0, ready_at = :now, holder = NULL, nonce = NULL, lost = 0, lost_with = 0,
    reopened = reopened + 1
WHERE id = :id

-- name: first_event
SELECT convert_to(data, 'UTF8') FROM perdure_events WHERE run = ? AND seq = 1

-- name: last_event_of_call
-- The event that a post about a call answers, if the sender does not name that event.
SELECT max(seq) FROM perdure_events WHERE run = :id AND call = :call::bigint

-- name: event_of_run
-- Is a posted event in the journal? The code asks after a COMMIT with unknown outcome.
SELECT 1 FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :run_id) AND event_id = :event_id

-- name: inbox_of_worker
SELECT i.id, r.run_id, i.call, convert_to(i.data, 'UTF8'), i.event_id
FROM perdure_inbox AS i JOIN perdure_runs AS r ON r.id = i.run WHERE r.holder = ? ORDER BY i.id

-- name: inbox_of_run
SELECT i.id, r.run_id, i.call, convert_to(i.data, 'UTF8'), i.event_id
FROM perdure_runs AS r JOIN perdure_inbox AS i ON i.run = r.id WHERE r.run_id = ? ORDER BY i.id

-- name: unread_of_run
SELECT id, call, event_id, convert_to(data, 'UTF8') FROM perdure_inbox WHERE run = ? ORDER BY id

-- name: remember_signal
-- If the run has had a signal with this key on this topic before, nothing changes.
INSERT INTO perdure_signals (run, topic, key) VALUES (?, ?, ?) ON CONFLICT DO NOTHING

-- == What follows from events ========================================================================================

-- name: keep_append
RELEASE SAVEPOINT perdure_append

-- name: undo_append
ROLLBACK TO SAVEPOINT perdure_append

-- name: insert_approval
-- If the id is taken, nothing changes.
INSERT INTO perdure_approvals (approval, run, seq, call, action, asked_at, deciders, expires_at)
VALUES (:approval, :run, :seq, :call, :action, :asked_at, :deciders, :expires_at) ON CONFLICT DO NOTHING

-- name: approval_by_id
-- The last column is the event that requested it. If that was removed, it is the checkpoint: its image holds the request.
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, convert_to(e.data, 'UTF8')
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
    LEFT JOIN perdure_checkpoints AS c ON c.run = a.run AND c.removed >= a.seq
    JOIN perdure_events AS e ON e.run = a.run AND e.seq = coalesce(c.removed + 1, a.seq)
WHERE a.approval = ?

-- name: approval_to_change
-- Like approval_by_id, in a transaction that changes the approval. The caller has already locked the approval's run
-- with run_to_change: all code locks in that order.
SELECT a.approval, r.run_id, a.call, r.agent, r.tenant, r.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, convert_to(e.data, 'UTF8')
FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
    LEFT JOIN perdure_checkpoints AS c ON c.run = a.run AND c.removed >= a.seq
    JOIN perdure_events AS e ON e.run = a.run AND e.seq = coalesce(c.removed + 1, a.seq)
WHERE a.approval = ? FOR NO KEY UPDATE OF a

-- name: list_approvals
-- Select the page of approvals first, then join the events: the planner cannot estimate how many approvals have a
-- status.
SELECT a.approval, a.run_id, a.call, a.agent, a.tenant, a.actor, a.asked_at, a.settled_at, a.status, a.deciders, a.expires_at, a.escalated,
    a.voters, a.digest, a.settled_by, a.note, a.id, a.seq, convert_to(e.data, 'UTF8')
FROM (
    SELECT a.*, r.run_id, r.agent, r.tenant, r.actor FROM perdure_approvals AS a JOIN perdure_runs AS r ON r.id = a.run
    WHERE a.status = ANY (ARRAY(SELECT jsonb_array_elements_text(:statuses::jsonb)))
        AND (:tenant::text IS NULL OR r.tenant = :tenant)
        AND CASE WHEN :run_id::text IS NULL THEN r.specimen IS NULL ELSE r.run_id = :run_id END
    ORDER BY a.expires_at NULLS LAST, a.asked_at, a.id LIMIT :limit
) AS a LEFT JOIN perdure_checkpoints AS c ON c.run = a.run AND c.removed >= a.seq
    JOIN perdure_events AS e ON e.run = a.run AND e.seq = coalesce(c.removed + 1, a.seq)
ORDER BY a.expires_at NULLS LAST, a.asked_at, a.id

-- == Budgets and costs ===============================================================================================

-- name: charge_budgets
-- Count the charge in the run's budget and in all budgets above it. The budget of the root is locked first, as in
-- every transaction.
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

-- name: over_budget
-- The runs under this budget that have stopped because of a budget, each with its last budget_exceeded event. `|| ''`: they are found by
-- their budget, not by the index of statuses.
WITH RECURSIVE below (run) AS (
    SELECT id FROM perdure_runs WHERE run_id = ?
    UNION
    SELECT b.run FROM perdure_budgets AS b JOIN below ON b.above = below.run
)
SELECT r.run_id, (
    SELECT convert_to(e.data, 'UTF8') FROM perdure_events AS e
    WHERE e.run = r.id AND starts_with(e.data, '{"type":"budget_exceeded"') ORDER BY e.seq DESC LIMIT 1)
FROM below JOIN perdure_runs AS r ON r.ledger = below.run
WHERE r.status || '' = 'needs_attention' AND r.attention = 'budget'
ORDER BY r.id

-- name: attempts_told
-- The events that begin, end and settle attempts, and that begin, release and end runs: run by run and in
-- order, after the position (:run, :seq). The statement does not use e.type, which calls a function: a role that may
-- read the table may not be allowed to call that function.
SELECT r.id, e.seq, r.run_id, r.agent, r.tenant, e.call, kind.of_event, e.ts, convert_to(e.data, 'UTF8')
FROM perdure_runs AS r JOIN perdure_events AS e ON e.run = r.id CROSS JOIN LATERAL (SELECT split_part(left(e.data, 100), '"', 4)) AS kind (of_event)
WHERE (e.run, e.seq) > (:run::bigint, :seq::bigint) AND r.updated_at >= :since AND r.specimen IS NULL AND (:tenant::text IS NULL OR r.tenant = :tenant)
    AND (kind.of_event IN ('tool_call_initiated', 'tool_call_completed', 'tool_call_failed', 'tool_call_in_doubt',
        'tool_call_resolved', 'model_call_initiated', 'model_call_completed', 'model_call_failed', 'run_cancelled',
        'run_created', 'run_claimed', 'run_released', 'run_reopened', 'run_forked', 'run_succeeded', 'run_failed')
    -- The checkpoint holds what the attempts before it have used, if their events were removed.
    OR kind.of_event = 'checkpoint_taken'
        AND e.seq = (SELECT c.removed + 1 FROM perdure_checkpoints AS c WHERE c.run = r.id AND c.removed > 0))
ORDER BY e.run, e.seq LIMIT :limit

-- name: attempts_told_of_runs
-- Like attempts_told, for these runs.
SELECT r.id, e.seq, r.run_id, r.agent, r.tenant, e.call, kind.of_event, e.ts, convert_to(e.data, 'UTF8')
FROM perdure_runs AS r JOIN perdure_events AS e ON e.run = r.id CROSS JOIN LATERAL (SELECT split_part(left(e.data, 100), '"', 4)) AS kind (of_event)
WHERE r.id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))
    AND (e.run, e.seq) > (:run::bigint, :seq::bigint) AND r.specimen IS NULL
    AND (kind.of_event IN ('tool_call_initiated', 'tool_call_completed', 'tool_call_failed', 'tool_call_in_doubt', 'tool_call_resolved',
        'model_call_initiated', 'model_call_completed', 'model_call_failed', 'run_cancelled', 'run_forked')
    OR kind.of_event = 'checkpoint_taken'
        AND e.seq = (SELECT c.removed + 1 FROM perdure_checkpoints AS c WHERE c.run = r.id AND c.removed > 0))
ORDER BY e.run, e.seq LIMIT :limit

-- == Notices =========================================================================================================

-- name: notices_to_take
-- Like due_notices, and the notices are locked. Notices that another process is just taking are skipped.
SELECT id, run, seq, attempts FROM perdure_notices WHERE next_at <= ? ORDER BY next_at, id LIMIT ? FOR UPDATE SKIP LOCKED

-- name: event_of_notice
SELECT r.run_id, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, convert_to(e.data, 'UTF8')
FROM perdure_runs AS r JOIN perdure_events AS e ON e.run = r.id WHERE r.id = ? AND e.seq = ?

-- == Workers, lines and claims =======================================================================================

-- name: insert_line
-- If another transaction has inserted the same line, nothing changes.
INSERT INTO perdure_lines (agent, version, queue, tenant, priority) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING

-- name: lines_with_ready_runs
-- The served lines whose first run is ready; each line with the ready_at of that run, and with the tenant's last turn.
SELECT l.id, l.queue, l.tenant, l.priority, h.ready_at,
    coalesce((SELECT turn FROM perdure_turns AS t WHERE t.queue = l.queue AND t.tenant = l.tenant), 0)
FROM jsonb_array_elements(:served::jsonb) AS s (value)
    JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
    CROSS JOIN LATERAL (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at <= :now ORDER BY ready_at LIMIT 1) AS h
WHERE :queues::jsonb IS NULL OR l.queue IN (SELECT jsonb_array_elements_text(:queues::jsonb))

-- name: ready_below
-- The ready runs below a run (see family_of_run). If :suspects is false, suspects are left out. Locked runs are
-- skipped: another worker is just claiming them.
SELECT {run}, {ended}
FROM perdure_runs
WHERE run_id > :run_id::text || '/' AND run_id < :run_id::text || '0' AND ready_at <= :now AND :queues::jsonb IS NULL
    AND (:suspects::boolean OR crashes + (lost > 0)::int < 2)
    AND EXISTS (SELECT 1 FROM jsonb_array_elements(:served::jsonb) AS s (value) WHERE s.value ->> 0 = agent AND s.value ->> 1 = version)
ORDER BY ready_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED

-- name: ready_of_line
-- The ready runs of a line, after the position (:after_ready, :after_id); the run that has been ready longest is
-- first. If :suspects is false, suspects are left out. Locked runs are skipped: another worker is just claiming them.
SELECT {run}, {ended}
FROM perdure_runs
WHERE line = :line AND ready_at <= :now AND (ready_at, id) > (:after_ready::bigint, :after_id::bigint)
    AND (:suspects::boolean OR crashes + (lost > 0)::int < 2)
ORDER BY ready_at, id LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED

-- name: held_by_party
-- How many runs are held, per queue and tenant. This reads only the index of held runs, and the lines.
SELECT l.queue, l.tenant, sum(h.held)::bigint
FROM (SELECT line, count(*) AS held FROM perdure_runs WHERE holder IS NOT NULL GROUP BY line) AS h
    JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: ready_by_party
-- How many runs are ready, per queue and tenant; and the ready_at of the run that has been ready longest.
SELECT l.queue, l.tenant, sum(h.ready)::bigint, min(h.since)
FROM (SELECT line, count(*) AS ready, min(ready_at) AS since FROM perdure_runs WHERE ready_at <= :now GROUP BY line) AS h
    JOIN perdure_lines AS l ON l.id = h.line
GROUP BY l.queue, l.tenant

-- name: newest_turn
SELECT coalesce(max(turn), 0) FROM perdure_turns

-- name: had_turn
-- If another worker updates the same row at the same moment, do not wait for it: only that worker's turn is stored.
WITH free AS (
    SELECT queue, tenant FROM perdure_turns WHERE queue = ?1 AND tenant = ?2 FOR NO KEY UPDATE SKIP LOCKED
), kept AS (
    UPDATE perdure_turns AS t SET turn = greatest(turn, ?3::bigint) FROM free WHERE t.queue = free.queue AND t.tenant = free.tenant
)
INSERT INTO perdure_turns (queue, tenant, turn) VALUES (?1, ?2, ?3) ON CONFLICT (queue, tenant) DO NOTHING

-- name: claim_run
-- The epoch becomes higher: from now on, appends of the earlier holder are refused.
UPDATE perdure_runs SET epoch = :epoch, nonce = :nonce, holder = :worker, seq = :seq, head = :head, crashes = :crashes, lost_with = :lost_with,
    lost = 0, ready_at = NULL, waiting_for = NULL, error = NULL, attention = NULL, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'running' END,
    version = coalesce(:version::text, version), line = coalesce(:line::bigint, line)
WHERE id = :id

-- name: claim_at_once
-- If the served lines with ready runs all have the same queue, tenant and priority, claim their first ready runs: like
-- claim_run, insert_event and had_turn, in one statement, which is one transaction and one round trip. In :served, an
-- entry for runs without a version also has the version that they take, and the event of the claim with that version;
-- if the line of that version does not exist yet, nothing is claimed here. The answer has three kinds of rows. (1) A claimed run,
-- or one row without a run if nothing was claimed. The first columns of this row: how many ready runs there were,
-- whether turns, limits, suspects or an edited row matter (then nothing is claimed), and when the next run of any served
-- line is ready. (2) An event of a claimed run, with the run's key; the events of a long journal are left out. (3) An inbox
-- row of a claimed run, with the run's key. Events and inbox rows are complete up to the claim, because nothing is put
-- into the inbox of a run that is not held. A run that another transaction has locked, or has changed since this
-- statement began, is skipped: the statement never waits. It is enough to compare the seq: no transaction claims,
-- stops or ends a ready run without an event. The hash is computed as in perdure.core.identity.link. Nonces and event
-- ids are derived from a secret of this claim. The advisory lock is for claim_is_over, which waits for the end of this
-- statement.
WITH served AS MATERIALIZED (
    SELECT l.id, l.queue, l.tenant, l.priority, s.value ->> 2 AS takes, s.value ->> 3 AS data,
        CASE WHEN s.value ->> 2 IS NULL THEN l.id ELSE (SELECT t.id FROM perdure_lines AS t WHERE t.agent = l.agent
            AND t.version = s.value ->> 2 AND t.queue = l.queue AND t.tenant = l.tenant AND t.priority = l.priority) END AS goal,
        EXISTS (SELECT 1 FROM perdure_runs WHERE line = l.id AND ready_at <= :now::bigint) AS ready,
        (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at > :now ORDER BY ready_at LIMIT 1) AS later
    FROM jsonb_array_elements(:served::jsonb) AS s (value)
        JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
    WHERE :queues::jsonb IS NULL OR l.queue IN (SELECT jsonb_array_elements_text(:queues::jsonb))
), head AS (
    SELECT count(DISTINCT (queue, tenant, priority)) FILTER (WHERE ready) AS kinds, count(*) FILTER (WHERE ready AND goal IS NULL) AS without_goal,
        min(queue) FILTER (WHERE ready) AS queue, min(tenant) FILTER (WHERE ready) AS tenant, min(later) AS later
    FROM served
), chosen AS MATERIALIZED (
    SELECT queue, tenant FROM head
    WHERE kinds = 1 AND without_goal = 0 AND queue NOT IN (SELECT jsonb_array_elements_text(:limited::jsonb))
        AND EXISTS (SELECT 1 FROM perdure_workers WHERE worker = :worker AND name = :name::text)
        AND pg_try_advisory_xact_lock_shared(:token::bigint)
), first AS MATERIALIZED (
    SELECT r.id, r.seq, r.lost > 0 OR r.crashes >= :suspect::bigint OR r.ended IS NOT NULL AS is_special, s.takes, s.data, s.goal
    FROM chosen CROSS JOIN (SELECT id, takes, data, goal FROM served WHERE ready) AS s CROSS JOIN LATERAL (
        SELECT id, seq, lost, crashes, ready_at, {ended} AS ended FROM perdure_runs WHERE line = s.id AND ready_at <= :now ORDER BY ready_at, id LIMIT :limit
    ) AS r
    ORDER BY r.ready_at, r.id LIMIT :limit
), seen AS MATERIALIZED (
    SELECT count(*) AS runs, coalesce(bool_or(is_special), FALSE) OR NOT EXISTS (SELECT 1 FROM perdure_workers WHERE worker = :worker AND name = :name)
        OR (SELECT kinds > 0 FROM head) AND NOT EXISTS (SELECT 1 FROM chosen) AS to_be_weighed
    FROM first
), free AS (
    SELECT r.id, r.seq, r.epoch, r.head, f.takes, f.data, f.goal FROM first AS f JOIN perdure_runs AS r ON r.id = f.id
    WHERE r.seq = f.seq AND NOT (SELECT to_be_weighed FROM seen) ORDER BY r.id FOR NO KEY UPDATE OF r SKIP LOCKED
), sealed AS (
    SELECT f.id, f.seq, f.epoch + 1 AS epoch, f.takes, coalesce(f.data, :data::text) AS data, f.goal, e.event_id, substr(sha256(:secret::bytea || int8send(f.id)), 1, 16) AS nonce,
        sha256(f.head || convert_to(concat(f.seq + 1, '|', encode(e.event_id, 'hex'), '|', :now, '|', f.epoch + 1, '||', f.seq, '|', coalesce(f.data, :data)), 'UTF8')) AS hash
    FROM free AS f CROSS JOIN LATERAL (SELECT substr(sha256(int8send(f.id) || :secret), 1, 16) AS event_id) AS e
), taken AS (
    UPDATE perdure_runs AS r SET epoch = s.epoch, nonce = s.nonce, holder = :worker::text, seq = s.seq + 1, head = s.hash,
        ready_at = NULL, waiting_for = NULL, error = NULL, attention = NULL, updated_at = greatest(r.updated_at, :now),
        status = CASE WHEN r.status = 'cancelling' THEN r.status ELSE 'running' END, version = coalesce(s.takes, r.version), line = s.goal
    FROM sealed AS s WHERE r.id = s.id
    RETURNING r.run_id, r.agent, r.version, r.tenant, r.actor, r.queue, r.target, r.input_digest, r.status, r.waiting_for, r.ready_at,
        r.seq, r.head, r.epoch, r.holder, r.crashes, r.error, r.created_at, r.updated_at, r.priority, r.attention, r.parent, r.parent_call,
        r.lost, r.lost_with, r.specimen, r.id, r.nonce, s.event_id, s.takes
), written AS (
    INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash)
    SELECT s.id, s.seq + 1, s.event_id, :now, s.epoch, NULL, s.seq, s.data, s.hash FROM sealed AS s JOIN taken AS t ON t.id = s.id
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
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, t.id, NULL, NULL, NULL, e.seq, e.event_id, e.ts, e.epoch, e.call, e.cause, convert_to(e.data, 'UTF8'), NULL
FROM taken AS t JOIN perdure_events AS e ON e.run = t.id AND t.seq <= :few::bigint
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, t.id, NULL, NULL, NULL, NULL, i.event_id, i.ts, NULL, i.call, NULL, convert_to(i.data, 'UTF8'), i.id
FROM taken AS t JOIN perdure_inbox AS i ON i.run = t.id

-- name: claimed_at_once
-- The runs that the claim with this secret has taken. If the claim is still under way, there are no rows.
SELECT {run}, nonce
FROM perdure_runs WHERE holder = :worker AND nonce = substr(sha256(:secret::bytea || int8send(id)), 1, 16) ORDER BY id

-- name: claim_is_over
-- If the claim with this token is under way, wait for its end. If the claim comes during this transaction, it claims
-- nothing.
SELECT pg_advisory_xact_lock(:token::bigint)

-- name: next_ready
-- The earliest ready_at of all served lines, in the past or in the future.
SELECT min(h.ready_at)
FROM jsonb_array_elements(:served::jsonb) AS s (value)
    JOIN perdure_lines AS l ON l.agent = s.value ->> 0 AND l.version = s.value ->> 1
    CROSS JOIN LATERAL (SELECT ready_at FROM perdure_runs WHERE line = l.id AND ready_at IS NOT NULL ORDER BY ready_at LIMIT 1) AS h
WHERE :queues::jsonb IS NULL OR l.queue IN (SELECT jsonb_array_elements_text(:queues::jsonb))

-- name: next_schedules
-- The schedules of served agents, the next due one first. A tick that waits for the end of a run is not due.
SELECT s.schedule_id, s.agent, s.queue, s.due_at, s.waits_for, convert_to(s.state, 'UTF8'), s.seq, s.head
FROM perdure_schedules AS s LEFT JOIN perdure_runs AS r ON r.run_id = s.waits_for
WHERE s.due_at IS NOT NULL AND (r.status IS NULL OR r.status IN ('succeeded', 'failed', 'cancelled'))
    AND s.agent IN (SELECT v.value ->> 0 FROM jsonb_array_elements(:served::jsonb) AS v (value))
    AND (:queues::jsonb IS NULL OR s.queue IN (SELECT jsonb_array_elements_text(:queues::jsonb)))
ORDER BY s.due_at, s.id LIMIT :limit

-- name: all_schedules
SELECT schedule_id, agent, queue, due_at, waits_for, convert_to(state, 'UTF8'), seq, head FROM perdure_schedules
WHERE :schedule_id::text IS NULL OR schedule_id = :schedule_id ORDER BY schedule_id COLLATE "C"

-- name: stored_schedule_events
SELECT e.seq, e.event_id, e.ts, 0, NULL, NULL, convert_to(e.data, 'UTF8'), e.hash
FROM perdure_schedule_events AS e JOIN perdure_schedules AS s ON s.id = e.schedule
WHERE s.schedule_id = :schedule_id AND e.seq > :after ORDER BY e.seq LIMIT :limit

-- name: parents_to_replay
-- Start at ready children in lines that are not served, and go up to the first ancestor whose agent is served. A
-- replay of that ancestor finds the agent of the run right below that ancestor.
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
-- If the worker already has a row, update what the worker serves. The lease of a worker counts by the clock of the
-- database.
INSERT INTO perdure_workers AS w (worker, name, pid, started_at, beat_at, serves, queues, lease_us)
VALUES (:worker, :name, :pid, :now, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, :served, :queues, :lease_us::bigint)
ON CONFLICT (worker) DO UPDATE SET name = excluded.name, pid = excluded.pid, beat_at = excluded.beat_at, serves = excluded.serves,
    queues = excluded.queues, started_at = CASE WHEN w.pid = excluded.pid THEN w.started_at ELSE excluded.started_at END

-- name: beat
-- The new time may be lower than the last time, if a clock was set back. To keep the higher time would be wrong: after
-- its death, the worker would look alive for too long.
UPDATE perdure_workers SET beat_at = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
WHERE worker = :worker AND :now::bigint IS NOT NULL

-- name: list_workers
-- The last column: how long ago was the last heartbeat, by the clock of the database? The held runs are counted once
-- for all workers.
SELECT w.worker, w.name, w.pid, w.started_at, w.beat_at, coalesce(h.runs, 0), w.serves, w.queues, w.lease_us,
    (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - w.beat_at + :now::bigint * 0
FROM perdure_workers AS w LEFT JOIN (
    SELECT holder, count(*) AS runs FROM perdure_runs WHERE holder IS NOT NULL GROUP BY holder
) AS h ON h.holder = w.worker
ORDER BY w.started_at, w.worker

-- name: workers_without_session
-- The workers that hold a run and whose connection (with its session lock) is gone: each is dead, or cut off for the
-- moment.
SELECT w.worker, w.beat_at FROM perdure_workers AS w
WHERE w.session AND EXISTS (SELECT 1 FROM perdure_runs AS r WHERE r.holder = w.worker) AND NOT EXISTS (
    SELECT 1 FROM pg_locks AS l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended(current_schema() || ' ' || w.worker, 0))

-- name: has_session
UPDATE perdure_workers SET session = TRUE WHERE worker = ?

-- name: has_no_session
-- The worker's connection is gone, but the worker is alive: until it has a new session lock, only its lease counts.
UPDATE perdure_workers SET session = FALSE, beat_at = (extract(epoch FROM clock_timestamp()) * 1000000)::bigint WHERE worker = ?

-- name: forget_workers
-- Delete workers that have been silent for :silent_us and hold no run: their machines are gone.
DELETE FROM perdure_workers AS w
WHERE beat_at < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - :silent_us::bigint
    AND NOT EXISTS (SELECT 1 FROM perdure_runs AS r WHERE r.holder = w.worker)

-- name: holders_without_worker
SELECT DISTINCT holder FROM perdure_runs AS r
WHERE holder IS NOT NULL AND NOT EXISTS (SELECT 1 FROM perdure_workers AS w WHERE w.worker = r.holder)

-- name: lose_runs
-- The holder is gone, so its runs become claimable at once. `lost` tells the next claim that it is a takeover, and
-- `lost_with` tells how many other runs may be to blame. Runs that are just being written to are skipped; the next
-- reap finds them.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now::bigint, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'queued' END,
    lost_with = CASE WHEN crashes >= 2 THEN :beside_suspects::bigint ELSE :beside::bigint END
WHERE id IN (SELECT id FROM perdure_runs WHERE holder = :worker ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)

-- name: lose_run
-- Like lose_runs, for one run. If the run was claimed again, it has another epoch, and nothing changes.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now::bigint, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'queued' END,
    lost_with = CASE WHEN crashes >= 2 THEN :beside_suspects::bigint ELSE :beside::bigint END
WHERE run_id = :run_id AND holder = :worker AND epoch = :epoch

-- name: lose_runs_of_silent_worker
-- Like lose_runs. If the worker has sent another heartbeat since :beat_at, nothing changes.
UPDATE perdure_runs SET holder = NULL, nonce = NULL, lost = :lost, ready_at = :now::bigint, updated_at = greatest(updated_at, :now::bigint),
    status = CASE WHEN status = 'cancelling' THEN status ELSE 'queued' END,
    lost_with = CASE WHEN crashes >= 2 THEN :beside_suspects::bigint ELSE :beside::bigint END
WHERE id IN (SELECT id FROM perdure_runs WHERE holder = :worker ORDER BY id FOR NO KEY UPDATE SKIP LOCKED)
    AND EXISTS (SELECT 1 FROM perdure_workers AS w WHERE w.worker = :worker AND w.beat_at = :beat_at)

-- name: count_workers
-- How many workers have a valid lease, and how many have been silent for :silent_us and hold no run.
SELECT count(*) FILTER (WHERE w.beat_at >= (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - :lease_us::bigint),
    count(*) FILTER (WHERE w.beat_at < (extract(epoch FROM clock_timestamp()) * 1000000)::bigint - :silent_us::bigint
        AND NOT EXISTS (SELECT 1 FROM perdure_runs AS r WHERE r.holder = w.worker))
FROM perdure_workers AS w

-- == The progress of attempts ========================================================================================

-- name: progress_of_runs
SELECT r.run_id, p.call, p.attempt, p.progress, p.at
FROM perdure_runs AS r JOIN perdure_progress AS p ON p.run = r.id
WHERE r.run_id = ANY (ARRAY(SELECT jsonb_array_elements_text(:run_ids::jsonb))) ORDER BY r.id, p.call

-- == Rate limits =====================================================================================================

-- name: make_rate
-- Make sure that the rate has a row. The workers lock this row, so that only one worker at a time takes a place.
INSERT INTO perdure_rates (key, due, paused_until, seen_at) VALUES (?, 0, 0, 0) ON CONFLICT DO NOTHING

-- name: rate_to_change
SELECT due, paused_until, seen_at FROM perdure_rates WHERE key = ? FOR NO KEY UPDATE

-- name: hold_rate_back
INSERT INTO perdure_rates AS r (key, due, paused_until, seen_at) VALUES (:key, 0, :until, 0)
ON CONFLICT (key) DO UPDATE SET paused_until = greatest(r.paused_until, excluded.paused_until)

-- == Exclusive locks by key ==========================================================================================

-- name: make_lock
INSERT INTO perdure_locks (key) VALUES (?) ON CONFLICT DO NOTHING

-- name: take_lock
SELECT 1 FROM perdure_locks WHERE key = ? FOR UPDATE

-- == Repairing =======================================================================================================

-- name: drop_guards_of_runs
-- Switch off the triggers that refuse changes of rows which a repair has to change. Other writers wait until its end.
ALTER TABLE perdure_runs DISABLE TRIGGER perdure_runs_finished, DISABLE TRIGGER perdure_runs_identity

-- name: drop_guards_of_approvals
ALTER TABLE perdure_approvals DISABLE TRIGGER perdure_approvals_settled

-- name: restore_guards_of_runs
ALTER TABLE perdure_runs ENABLE TRIGGER perdure_runs_finished, ENABLE TRIGGER perdure_runs_identity

-- name: restore_guards_of_approvals
ALTER TABLE perdure_approvals ENABLE TRIGGER perdure_approvals_settled

-- == Moving, pruning =================================================================================================

-- name: lock_journal
-- Wait for every transaction that is writing to a run, and block new transactions, which then find the journal closed.
LOCK TABLE perdure_runs IN EXCLUSIVE MODE

-- name: lock_workers
LOCK TABLE perdure_workers IN SHARE ROW EXCLUSIVE MODE

-- name: other_tables
SELECT relname::text FROM pg_class
WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition AND left(relname, 8) <> 'perdure_'
ORDER BY 1

-- name: roots
-- The runs without a parent, in the order of their keys.
SELECT id, run_id FROM perdure_runs WHERE id > :after AND strpos(run_id, '/') = 0 ORDER BY id LIMIT :limit

-- name: families
-- All runs of these families (see family_of_run).
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
-- All columns that are also valid in another database: no keys and no holder. The last column is the id of the run
-- whose budget applies first.
SELECT id, run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes,
    error, created_at, updated_at, priority, attention, parent, parent_call, parent_seq, depth, lost_with, specimen,
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
-- The first column is the run that has the budget. The second column is the run that has the next budget above.
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
-- Insert a run from another journal, with its ready_at. No row is returned if the id is taken.
INSERT INTO perdure_runs (run_id, agent, version, tenant, actor, queue, target, input_digest, status, waiting_for, ready_at, seq, head, epoch, lost, crashes, error,
    created_at, updated_at, priority, attention, parent, parent_call, parent_seq, depth, lost_with, specimen, line, ledger)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT ledger FROM perdure_runs WHERE run_id = ?::text))
ON CONFLICT (run_id) DO NOTHING RETURNING id

-- name: take_in_events
-- Insert the events of many runs.
INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash)
SELECT e.* FROM unnest(:runs::bigint[], :seqs::bigint[], :ids::bytea[], :times::bigint[], :epochs::bigint[], :calls::bigint[],
    :causes::bigint[], :data::text[], :hashes::bytea[]) AS e (run, seq, event_id, ts, epoch, call, cause, data, hash)

-- name: copy_events
-- Copy the events of the run :parent up to :last, but not :others, to the run :run. The n-th 32 bytes of :hashes are the
-- hash of event n there.
INSERT INTO perdure_events (run, seq, event_id, ts, epoch, call, cause, data, hash)
SELECT :run::bigint, seq, event_id, ts, epoch, call, cause, data, substr(:hashes::bytea, seq::int * 32 - 31, 32)
FROM perdure_events WHERE run = (SELECT id FROM perdure_runs WHERE run_id = :parent) AND seq <= :last::bigint
    AND seq NOT IN (SELECT jsonb_array_elements_text(:others::jsonb)::bigint)

-- name: take_in_budget
INSERT INTO perdure_budgets (run, above, limit_usd_micros, limit_tokens, limit_calls, limit_busy_us, on_exceed, spent_usd_micros,
    spent_tokens, spent_calls, spent_busy_us, reserved_usd_micros, reserved_tokens, reserved_calls, reserved_busy_us)
VALUES (?, (SELECT id FROM perdure_runs WHERE run_id = ?::text), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: use_blob
INSERT INTO perdure_blob_uses (run, digest) VALUES (?, ?) ON CONFLICT DO NOTHING

-- name: known_blobs
SELECT digest FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value)))

-- name: run_to_keep
-- Lock this run against a prune, while the transaction adds another run to its family.
SELECT id FROM perdure_runs WHERE run_id = ? FOR KEY SHARE

-- name: prunable
-- The families that ended before :before, whose root has one of :statuses, and which have no notice left to send; each
-- family with the number of its runs and events.
SELECT r.id, r.run_id,
    1 + (SELECT count(*) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0')::bigint,
    (r.seq + (SELECT coalesce(sum(k.seq), 0) FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'))::bigint
FROM perdure_runs AS r
WHERE r.id > :after AND strpos(r.run_id, '/') = 0 AND r.specimen IS NULL AND r.status = ANY (ARRAY(SELECT jsonb_array_elements_text(:statuses::jsonb))) AND r.updated_at < :before
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0'
            AND (k.status NOT IN ('succeeded', 'failed', 'cancelled') OR k.updated_at >= :before))
    AND NOT EXISTS (SELECT 1 FROM perdure_notices AS n WHERE n.run = r.id)
    AND NOT EXISTS (
        SELECT 1 FROM perdure_runs AS k JOIN perdure_notices AS n ON n.run = k.id
        WHERE k.run_id > r.run_id || '/' AND k.run_id < r.run_id || '0')
ORDER BY r.id LIMIT :limit

-- name: runs_to_prune
-- Lock these runs: until this transaction ends, no other transaction can change them, or add runs to their families.
SELECT id FROM perdure_runs WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))
ORDER BY id FOR UPDATE

-- name: unsent_notices
-- The runs that have notices left to send.
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

-- name: prune_progress
DELETE FROM perdure_progress WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_approvals
DELETE FROM perdure_approvals WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_budgets
DELETE FROM perdure_budgets WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_blob_uses
DELETE FROM perdure_blob_uses WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_events
DELETE FROM perdure_events WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_checkpoints
DELETE FROM perdure_checkpoints WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: prune_labels
DELETE FROM perdure_labels WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: whole_labels
SELECT run, key, value FROM perdure_labels
WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) ORDER BY run, key

-- name: labels_of_runs
SELECT r.run_id, l.key, l.value FROM jsonb_array_elements_text(:run_ids::jsonb) AS j (run_id)
JOIN perdure_runs AS r ON r.run_id = j.run_id JOIN perdure_labels AS l ON l.run = r.id ORDER BY l.run, l.key

-- name: whole_checkpoints
SELECT run, seq, removed, head, by, at FROM perdure_checkpoints
WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: hash_of_event
SELECT hash FROM perdure_events WHERE run = ? AND seq = ?

-- name: prune_events_before
DELETE FROM perdure_events WHERE run = :run AND seq BETWEEN 2 AND :removed

-- name: events_left
SELECT convert_to(data, 'UTF8') FROM perdure_events WHERE run = :run AND (seq = 1 OR seq > :removed)

-- name: prune_some_blob_uses
DELETE FROM perdure_blob_uses WHERE run = :run
    AND digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value)))

-- name: prune_runs
DELETE FROM perdure_runs WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: blobs_to_prune
-- Lock the blobs before prune_blobs checks which blobs are used. A transaction that is storing one of these blobs
-- again has a lock on it until its commit, so prune_blobs sees that the blob is used.
SELECT digest FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value))) ORDER BY digest FOR UPDATE

-- name: prune_blobs
DELETE FROM perdure_blobs WHERE digest = ANY (ARRAY(SELECT decode(value, 'hex') FROM jsonb_array_elements_text(:digests::jsonb) AS v (value)))
    AND NOT EXISTS (SELECT 1 FROM perdure_blob_uses AS u WHERE u.digest = perdure_blobs.digest)

-- == Artifacts ========================================================================================================

-- name: artifact_to_change
SELECT id, state FROM perdure_artifacts WHERE artifact = ? FOR UPDATE

-- name: artifacts_to_use
-- The artifacts of this tenant that a new run, or a signal, names. They stay locked until this transaction has
-- recorded that the run uses them: no prune can delete them before.
SELECT id, artifact FROM perdure_artifacts
WHERE artifact = ANY (ARRAY(SELECT jsonb_array_elements_text(:artifacts::jsonb))) AND tenant = :tenant AND state = 'saved'
ORDER BY id FOR KEY SHARE

-- name: whole_artifact_uses
-- The saved artifacts that these families use, by the key of their root.
SELECT u.run, a.artifact FROM perdure_artifact_uses AS u JOIN perdure_artifacts AS a ON a.id = u.artifact
WHERE u.run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) AND a.state = 'saved' ORDER BY u.run, u.artifact

-- name: used_artifacts
SELECT DISTINCT artifact FROM perdure_artifact_uses WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) ORDER BY artifact

-- name: prune_artifact_uses
DELETE FROM perdure_artifact_uses WHERE run = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value)))

-- name: lock_artifacts
-- Lock these artifacts before artifacts_to_prune checks which of them are used: a transaction that gives one of them
-- to a new run has a lock on it until its commit.
SELECT id FROM perdure_artifacts WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:artifacts::jsonb) AS v (value))) ORDER BY id FOR UPDATE

-- name: artifacts_to_prune
SELECT id FROM perdure_artifacts WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:artifacts::jsonb) AS v (value)))
    AND NOT EXISTS (SELECT 1 FROM perdure_artifact_uses AS u WHERE u.artifact = perdure_artifacts.id) ORDER BY id

-- == Opening =========================================================================================================

-- name: migrating
-- If several processes start at the same time, only one creates the schema. The lock belongs to the transaction, so
-- that no lock stays in the session.
SELECT pg_advisory_xact_lock(hashtextextended('perdure schema ' || current_schema(), 0))

-- name: has_schema_table
-- Do not use to_regclass: after a wait for a migration by another process, the session's cache is out of date.
SELECT 1 FROM pg_class WHERE relname = 'perdure_schema' AND relnamespace = current_schema()::regnamespace

-- name: applied_migrations
SELECT version::bigint, checksum FROM perdure_schema ORDER BY version

-- name: record_migration
INSERT INTO perdure_schema (version, checksum, applied_at) VALUES (?, ?, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: facts
-- Do not count the connections in pg_stat_activity: it shows a user only the connections of that user.
SELECT current_setting('server_version'), pg_size_pretty(pg_database_size(current_database())), current_setting('fsync'),
    current_setting('synchronous_commit'), current_setting('max_connections'),
    (SELECT coalesce(sum(numbackends), 0)::bigint FROM pg_stat_database)

-- == In a transaction of the caller ==================================================================================

-- name: look_at_caller
-- What the caller's transaction allows, and its settings. The advisory lock shows that the caller's database is the
-- journal's. Its key is the same for all starts of a transaction: a lock for each start would fill the server's table.
SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only') = 'on', current_setting('client_encoding'),
    current_setting('search_path'), quote_ident(:schema::text) || ', pg_temp', current_setting('lock_timeout'),
    (extract(epoch FROM current_setting('lock_timeout')::interval) * 1000)::bigint,
    CASE WHEN pg_try_advisory_xact_lock(:key::int, pg_backend_pid()) THEN pg_backend_pid() ELSE 0 END,
    has_schema_privilege(:schema::text, 'USAGE')

-- name: is_free
-- Does no transaction hold this advisory lock?
SELECT pg_try_advisory_xact_lock(:key::int, :process::int)

-- name: set_for_transaction
-- Statements, and the functions of triggers, name tables without their schema. The settings last until the transaction ends.
SELECT set_config('search_path', ?, true), set_config('lock_timeout', ?, true)

-- name: ring
SELECT pg_notify(:channel::text, :words::text)

-- == For perdure doctor ==============================================================================================

-- name: durability
SELECT name, setting FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'autovacuum', 'track_counts')

-- name: dead_rows
-- Dead rows that autovacuum has not removed yet, in the tables whose rows change all the time.
SELECT relname::text, n_live_tup, n_dead_tup, (extract(epoch FROM greatest(last_vacuum, last_autovacuum)) * 1000000)::bigint
FROM pg_stat_user_tables
WHERE schemaname = current_schema() AND relname IN ('perdure_runs', 'perdure_workers', 'perdure_inbox', 'perdure_budgets')
ORDER BY n_dead_tup DESC

-- name: oldest_transaction
-- The transaction that has been open longest: until it ends, no vacuum removes rows that were changed since it began.
-- Only a member of pg_read_all_stats sees details of other users' transactions.
SELECT pid::bigint, coalesce(application_name, ''), coalesce(state, ''), (extract(epoch FROM clock_timestamp() - xact_start) * 1000000)::bigint
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
ORDER BY xact_start LIMIT 1

-- name: missing_privileges
-- The privileges that a worker, or a user who decides approvals, needs and this user lacks. The journal itself is
-- append-only, so no UPDATE on it is needed. UPDATE is granted per column; for a table whose rows are only locked, one
-- column is enough.
SELECT t.role, t.name, p.privilege
FROM (VALUES ('worker', 'perdure_schema', 'SELECT', ''), ('worker', 'perdure_moved', 'SELECT', ''), ('worker', 'perdure_pruned', 'SELECT', ''),
        ('worker', 'perdure_events', 'SELECT, INSERT', ''), ('worker', 'perdure_blobs', 'SELECT, INSERT, UPDATE', 'digest'),
        ('worker', 'perdure_blob_uses', 'SELECT, INSERT', ''), ('worker', 'perdure_lines', 'SELECT, INSERT', ''),
        ('worker', 'perdure_signals', 'SELECT, INSERT', ''),
        ('worker', 'perdure_artifacts', 'SELECT, INSERT, UPDATE, DELETE', 'state, place, object, sha256, size'),
        ('worker', 'perdure_artifact_chunks', 'SELECT, INSERT, DELETE', ''), ('worker', 'perdure_artifact_uses', 'SELECT, INSERT, DELETE', ''),
        ('worker', 'perdure_runs', 'SELECT, INSERT, UPDATE', 'version, status, waiting_for, ready_at, seq, head, epoch, nonce, holder, lost, '
            'lost_with, crashes, error, updated_at, attention, ledger, line, reopened'),
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
        ('worker', 'perdure_progress', 'SELECT, INSERT, UPDATE, DELETE', 'attempt, progress, at'),
        ('worker', 'perdure_checkpoints', 'SELECT, INSERT, UPDATE', 'seq'),
        ('worker', 'perdure_labels', 'SELECT, INSERT, UPDATE, DELETE', 'value'),
        ('worker', 'perdure_schedules', 'SELECT, INSERT, UPDATE', 'agent, queue, due_at, waits_for, state, seq, head'),
        ('worker', 'perdure_schedule_events', 'SELECT, INSERT', ''),
        ('worker', 'perdure_batches', 'SELECT, INSERT, UPDATE', 'ended_at'), ('decider', 'perdure_batches', 'INSERT, UPDATE', 'ended_at'),
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

-- name: specimens_among
SELECT run_id FROM perdure_runs
WHERE id = ANY (ARRAY(SELECT value::bigint FROM jsonb_array_elements_text(:runs::jsonb) AS v (value))) AND specimen IS NOT NULL
