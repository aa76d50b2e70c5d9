-- The journal-wide chain: a commit after which no worker holds the run (a release, an end, a post) also records the run's last event
-- here. So it shows if the end of a journal is cut off later, or if a whole run is deleted without a tombstone.

CREATE TABLE perdure_chain (
    n INTEGER PRIMARY KEY, -- without a gap
    run INTEGER NOT NULL, -- the number of the run; of a schedule: its number with a minus sign
    seq INTEGER NOT NULL, -- the run's last event in this commit …
    head BLOB NOT NULL, -- … and the first 16 bytes of its hash
    run_id TEXT, -- in the first entries of a run, to name it when it is gone
    link BLOB -- 16 bytes of a hash over the last link before this one and all entries since. NULL: a later link covers this entry
) STRICT;

-- Runs from before this table are covered from here on.
INSERT INTO perdure_chain (n, run, seq, head, run_id)
SELECT row_number() OVER (ORDER BY id), id, seq, substr(head, 1, 16), run_id FROM perdure_runs;

-- A run that was copied here. A new run has no entry before a worker has released it: an entry for each start would double the cost.
CREATE TRIGGER perdure_runs_copied_chained AFTER INSERT ON perdure_runs
WHEN NEW.seq > 1
BEGIN
    INSERT INTO perdure_chain (run, seq, head, run_id) VALUES (NEW.id, NEW.seq, substr(NEW.head, 1, 16), NEW.run_id);
END;

-- A run that is held needs no entry: if another hand cuts its journal, its worker is refused.
CREATE TRIGGER perdure_runs_chained AFTER UPDATE OF seq, holder ON perdure_runs
WHEN NEW.holder IS NULL AND (NEW.seq <> OLD.seq OR OLD.holder IS NOT NULL)
BEGIN
    INSERT INTO perdure_chain (run, seq, head, run_id) VALUES (NEW.id, NEW.seq, substr(NEW.head, 1, 16), iif(NEW.epoch <= 1, NEW.run_id, NULL));
END;

-- No worker holds a schedule, so each of its commits gets an entry.
CREATE TRIGGER perdure_schedules_added_chained AFTER INSERT ON perdure_schedules
BEGIN
    INSERT INTO perdure_chain (run, seq, head, run_id) VALUES (-NEW.id, NEW.seq, substr(NEW.head, 1, 16), 'schedule ' || NEW.schedule_id);
END;

CREATE TRIGGER perdure_schedules_chained AFTER UPDATE OF seq ON perdure_schedules
BEGIN
    INSERT INTO perdure_chain (run, seq, head) VALUES (-NEW.id, NEW.seq, substr(NEW.head, 1, 16));
END;

CREATE TRIGGER perdure_chain_no_update BEFORE UPDATE ON perdure_chain
WHEN OLD.link IS NOT NULL OR (NEW.n, NEW.run, NEW.seq, NEW.head) <> (OLD.n, OLD.run, OLD.seq, OLD.head) OR NEW.run_id IS NOT OLD.run_id
BEGIN
    SELECT raise(ABORT, 'perdure_chain is append-only');
END;

CREATE TRIGGER perdure_chain_no_delete BEFORE DELETE ON perdure_chain
BEGIN
    SELECT raise(ABORT, 'perdure_chain is append-only');
END;
