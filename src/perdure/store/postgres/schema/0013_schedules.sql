-- Schedules: each has a journal of its own, chained by hashes like that of a run, and a row that is the fold over it.
CREATE TABLE perdure_schedules (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule_id TEXT NOT NULL UNIQUE,
    agent TEXT NOT NULL,
    queue TEXT NOT NULL,
    due_at BIGINT, -- when its next tick is due; NULL: it is paused or removed
    waits_for TEXT, -- the run that must have ended before the next tick starts one
    state TEXT NOT NULL, -- JSON of everything that the journal says
    seq BIGINT NOT NULL,
    head BYTEA NOT NULL
) WITH (fillfactor = 50);

CREATE INDEX perdure_schedules_due ON perdure_schedules (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE perdure_schedule_events (
    schedule BIGINT NOT NULL REFERENCES perdure_schedules (id),
    seq BIGINT NOT NULL,
    event_id BYTEA NOT NULL,
    ts BIGINT NOT NULL,
    data TEXT NOT NULL,
    hash BYTEA NOT NULL,
    PRIMARY KEY (schedule, seq)
);

CREATE TRIGGER perdure_schedule_events_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON perdure_schedule_events
FOR EACH STATEMENT EXECUTE FUNCTION perdure_refuse('perdure_schedule_events is append-only');

-- An event follows the row, whose guard was checked.
CREATE FUNCTION perdure_check_schedule_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM perdure_schedules AS s WHERE s.id = NEW.schedule AND s.seq >= NEW.seq) THEN
        RAISE EXCEPTION 'an event must be covered by the seq of its schedule' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER perdure_schedule_events_guarded BEFORE INSERT ON perdure_schedule_events
FOR EACH ROW EXECUTE FUNCTION perdure_check_schedule_event();

-- A tick is never taken back: the row only goes forward, by events.
CREATE TRIGGER perdure_schedules_forward BEFORE UPDATE ON perdure_schedules
FOR EACH ROW WHEN (NEW.seq <= OLD.seq OR NEW.schedule_id <> OLD.schedule_id OR NEW.id <> OLD.id)
EXECUTE FUNCTION perdure_refuse('a schedule changes only by an event');

CREATE TRIGGER perdure_schedules_no_delete BEFORE DELETE OR TRUNCATE ON perdure_schedules
FOR EACH STATEMENT EXECUTE FUNCTION perdure_refuse('a schedule and its journal stay');

-- The journal was moved: its ticks are started where it is now.
CREATE TRIGGER perdure_schedules_open BEFORE INSERT OR UPDATE ON perdure_schedules
FOR EACH STATEMENT EXECUTE FUNCTION perdure_check_open();
