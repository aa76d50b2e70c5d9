-- Schedules: each has a journal of its own, chained by hashes like that of a run, and a row that is the fold over it.
CREATE TABLE perdure_schedules (
    id INTEGER PRIMARY KEY,
    schedule_id TEXT NOT NULL UNIQUE,
    agent TEXT NOT NULL,
    queue TEXT NOT NULL,
    due_at INTEGER, -- when its next tick is due; NULL: it is paused or removed
    waits_for TEXT, -- the run that must have ended before the next tick starts one
    state TEXT NOT NULL, -- JSON of everything that the journal says
    seq INTEGER NOT NULL,
    head BLOB NOT NULL
) STRICT;

CREATE INDEX perdure_schedules_due ON perdure_schedules (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE perdure_schedule_events (
    schedule INTEGER NOT NULL REFERENCES perdure_schedules (id),
    seq INTEGER NOT NULL,
    event_id BLOB NOT NULL,
    ts INTEGER NOT NULL,
    data TEXT NOT NULL,
    hash BLOB NOT NULL,
    PRIMARY KEY (schedule, seq)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER perdure_schedule_events_no_update BEFORE UPDATE ON perdure_schedule_events
BEGIN
    SELECT raise(ABORT, 'perdure_schedule_events is append-only');
END;

CREATE TRIGGER perdure_schedule_events_no_delete BEFORE DELETE ON perdure_schedule_events
BEGIN
    SELECT raise(ABORT, 'perdure_schedule_events is append-only');
END;

-- An event follows the row, whose guard was checked.
CREATE TRIGGER perdure_schedule_events_guarded BEFORE INSERT ON perdure_schedule_events
WHEN NOT EXISTS (SELECT 1 FROM perdure_schedules WHERE id = NEW.schedule AND seq >= NEW.seq)
BEGIN
    SELECT raise(ABORT, 'an event must be covered by the seq of its schedule');
END;

-- A tick is never taken back: the row only goes forward, by events.
CREATE TRIGGER perdure_schedules_forward BEFORE UPDATE ON perdure_schedules
WHEN NEW.seq <= OLD.seq OR NEW.schedule_id <> OLD.schedule_id OR NEW.id <> OLD.id
BEGIN
    SELECT raise(ABORT, 'a schedule changes only by an event');
END;

CREATE TRIGGER perdure_schedules_no_delete BEFORE DELETE ON perdure_schedules
BEGIN
    SELECT raise(ABORT, 'a schedule and its journal stay');
END;

-- The journal was moved: its ticks are started where it is now.
CREATE TRIGGER perdure_schedules_open BEFORE UPDATE ON perdure_schedules
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;

CREATE TRIGGER perdure_schedules_none_new BEFORE INSERT ON perdure_schedules
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;
