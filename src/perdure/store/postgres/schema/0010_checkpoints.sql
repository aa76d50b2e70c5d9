-- Where the runs begin whose agents take checkpoints: a claim reads the first event, and then the events from the last checkpoint on.
CREATE TABLE perdure_checkpoints (
    run BIGINT PRIMARY KEY REFERENCES perdure_runs (id),
    seq BIGINT NOT NULL, -- the last checkpoint; 0: the run went back to before it, and all of the journal is read
    removed BIGINT NOT NULL DEFAULT 0, -- the events from 2 to this one were removed; 0: none
    head BYTEA, -- the hash of the event `removed`, from which the hash chain goes on
    by TEXT,
    at BIGINT,
    CHECK (removed = 0 OR head IS NOT NULL AND by IS NOT NULL AND at IS NOT NULL)
) WITH (fillfactor = 50);

-- What may be removed of a run that stays: the events between the first one and a checkpoint. The hash is that of the last one of them.
CREATE FUNCTION perdure_check_removed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.removed <= OLD.removed OR NOT EXISTS (
            SELECT 1 FROM perdure_events AS e WHERE e.run = NEW.run AND e.seq = NEW.removed AND e.hash = NEW.head)
        OR NOT EXISTS (
            SELECT 1 FROM perdure_events AS e WHERE e.run = NEW.run AND e.seq = NEW.removed + 1 AND e.type = 'checkpoint_taken')
    THEN
        RAISE EXCEPTION 'only events before a checkpoint can be removed' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER perdure_checkpoints_true BEFORE UPDATE OF removed, head ON perdure_checkpoints
FOR EACH ROW EXECUTE FUNCTION perdure_check_removed();

CREATE TRIGGER perdure_checkpoints_no_delete AFTER DELETE ON perdure_checkpoints
REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION perdure_check_deleted('where a journal begins stays with its run');

CREATE FUNCTION perdure_check_deleted_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- One look for each run, by the index, however many tombstones there are.
    IF EXISTS (
        SELECT 1 FROM (SELECT run, min(seq) AS first, max(seq) AS last FROM gone GROUP BY run) AS g
        WHERE (SELECT p.id FROM perdure_pruned AS p WHERE p.number = g.run) IS NULL
            AND (g.first < 2 OR g.last > coalesce((SELECT c.removed FROM perdure_checkpoints AS c WHERE c.run = g.run), 0))
    ) THEN
        RAISE EXCEPTION USING MESSAGE = TG_ARGV[0], ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NULL;
END
$$;

DROP TRIGGER perdure_events_no_delete ON perdure_events;
CREATE TRIGGER perdure_events_no_delete AFTER DELETE ON perdure_events
REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION perdure_check_deleted_events('perdure_events is append-only');
