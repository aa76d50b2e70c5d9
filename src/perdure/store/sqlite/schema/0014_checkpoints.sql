-- Where the runs begin whose agents take checkpoints: a claim reads the first event, and then the events from the last checkpoint on.
CREATE TABLE perdure_checkpoints (
    run INTEGER PRIMARY KEY REFERENCES perdure_runs (id),
    seq INTEGER NOT NULL, -- the last checkpoint; 0: the run went back to before it, and all of the journal is read
    removed INTEGER NOT NULL DEFAULT 0, -- the events from 2 to this one were removed; 0: none
    head BLOB, -- the hash of the event `removed`, from which the hash chain goes on
    by TEXT,
    at INTEGER,
    CHECK (removed = 0 OR head IS NOT NULL AND by IS NOT NULL AND at IS NOT NULL)
) STRICT;

-- What may be removed of a run that stays: the events between the first one and a checkpoint. The hash is that of the last one of them.
CREATE TRIGGER perdure_checkpoints_true BEFORE UPDATE OF removed, head ON perdure_checkpoints
WHEN NEW.removed <= OLD.removed OR NOT EXISTS (
        SELECT 1 FROM perdure_events WHERE id = (NEW.run << 32 | NEW.removed) AND hash = NEW.head)
    OR NOT EXISTS (
        SELECT 1 FROM perdure_events WHERE id = (NEW.run << 32 | NEW.removed + 1) AND data LIKE '{"type":"checkpoint\_taken"%' ESCAPE '\')
BEGIN
    SELECT raise(ABORT, 'only events before a checkpoint can be removed');
END;

CREATE TRIGGER perdure_checkpoints_no_delete BEFORE DELETE ON perdure_checkpoints
WHEN NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE number = OLD.run)
BEGIN
    SELECT raise(ABORT, 'where a journal begins stays with its run');
END;

DROP TRIGGER perdure_events_no_delete;
CREATE TRIGGER perdure_events_no_delete BEFORE DELETE ON perdure_events
WHEN NOT EXISTS (SELECT 1 FROM perdure_pruned WHERE number = OLD.id >> 32)
    AND NOT EXISTS (SELECT 1 FROM perdure_checkpoints WHERE run = OLD.id >> 32 AND OLD.id & 4294967295 BETWEEN 2 AND removed)
BEGIN
    SELECT raise(ABORT, 'perdure_events is append-only');
END;
