-- The journal-wide chain: a commit after which no worker holds the run (a release, an end, a post) also records the run's last event
-- here. So it shows if the end of a journal is cut off later, or if a whole run is deleted without a tombstone.

-- At once as strong as the triggers need it: a lock that is raised later would deadlock with workers.
LOCK TABLE perdure_runs IN SHARE ROW EXCLUSIVE MODE;

-- Many transactions commit at the same time, and one chain would make them wait for each other: so there are several.
CREATE TABLE perdure_chain (
    n BIGINT NOT NULL, -- without a gap in its chain
    run BIGINT NOT NULL, -- the number of the run; of a schedule: its number with a minus sign
    chain INTEGER NOT NULL,
    seq INTEGER NOT NULL, -- the run's last event in this commit …
    head BYTEA NOT NULL, -- … and the first 16 bytes of its hash
    run_id TEXT, -- in the first entries of a run, to name it when it is gone
    link BYTEA, -- 16 bytes of a hash over the last link before this one and all entries since. NULL: a later link covers this entry
    PRIMARY KEY (chain, n)
);

-- Runs from before this table are covered from here on: by one link for all of them.
INSERT INTO perdure_chain (chain, n, run, seq, head, run_id)
SELECT 0, row_number() OVER (ORDER BY id), id, seq, substr(head, 1, 16), run_id FROM perdure_runs;

UPDATE perdure_chain SET link = (
    SELECT substr(sha256(string_agg(convert_to(concat(n, '|', run, '|', seq, '|', encode(head, 'hex'), '|', run_id, E'\n'), 'UTF8'), ''::bytea ORDER BY n)), 1, 16)
    FROM perdure_chain)
WHERE n = (SELECT max(n) FROM perdure_chain);

-- With the rights of the owner: a worker role adds entries only by its changes of runs. The hash is computed as in perdure.core.identity.chain_link.
CREATE FUNCTION perdure_add_to_chain() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    place INTEGER := -pg_backend_pid(); -- a chain of its own, if no other is free
    last RECORD;
    number BIGINT := NEW.id;
    name TEXT;
BEGIN
    -- A snapshot of a stricter isolation level may not have the last entry of a chain that other sessions use as well.
    IF current_setting('transaction_isolation') = 'read committed' THEN
        FOR step IN 0..7 LOOP
            IF pg_try_advisory_xact_lock(1885695076, (pg_backend_pid() + step) % 32) THEN
                place := (pg_backend_pid() + step) % 32;
                EXIT;
            END IF;
        END LOOP;
    END IF;
    IF TG_TABLE_NAME = 'perdure_schedules' THEN
        number := -NEW.id;
        IF TG_OP = 'INSERT' THEN
            name := 'schedule ' || NEW.schedule_id;
        END IF;
    ELSIF TG_OP = 'INSERT' OR NEW.epoch <= 1 THEN
        name := NEW.run_id;
    END IF;
    SELECT n, link INTO last FROM perdure_chain WHERE chain = place ORDER BY n DESC LIMIT 1;
    INSERT INTO perdure_chain (chain, n, run, seq, head, run_id, link)
    VALUES (place, coalesce(last.n, 0) + 1, number, NEW.seq, substr(NEW.head, 1, 16), name, substr(sha256(coalesce(last.link, ''::bytea)
        || convert_to(concat(coalesce(last.n, 0) + 1, '|', number, '|', NEW.seq, '|', encode(substr(NEW.head, 1, 16), 'hex'), '|', name, E'\n'), 'UTF8')), 1, 16));
    RETURN NULL;
END
$$;

-- The schema of this journal, and no table that a session has made for itself.
DO $$ BEGIN EXECUTE format('ALTER FUNCTION perdure_add_to_chain() SET search_path = %I, pg_temp', current_schema()); END $$;

-- The triggers need no EXECUTE. With it, any role could attach the function to a table of its own and add entries.
REVOKE EXECUTE ON FUNCTION perdure_add_to_chain() FROM PUBLIC;

-- A run that was copied here. A new run has no entry before a worker has released it: an entry for each start would double the cost.
CREATE TRIGGER perdure_runs_copied_chained AFTER INSERT ON perdure_runs
FOR EACH ROW WHEN (NEW.seq > 1) EXECUTE FUNCTION perdure_add_to_chain();

-- A run that is held needs no entry: if another hand cuts its journal, its worker is refused.
CREATE TRIGGER perdure_runs_chained AFTER UPDATE OF seq, holder ON perdure_runs
FOR EACH ROW WHEN (NEW.holder IS NULL AND (NEW.seq <> OLD.seq OR OLD.holder IS NOT NULL))
EXECUTE FUNCTION perdure_add_to_chain();

-- No worker holds a schedule, so each of its commits gets an entry.
CREATE TRIGGER perdure_schedules_added_chained AFTER INSERT ON perdure_schedules
FOR EACH ROW EXECUTE FUNCTION perdure_add_to_chain();

CREATE TRIGGER perdure_schedules_chained AFTER UPDATE OF seq ON perdure_schedules
FOR EACH ROW EXECUTE FUNCTION perdure_add_to_chain();

CREATE TRIGGER perdure_chain_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON perdure_chain
FOR EACH STATEMENT EXECUTE FUNCTION perdure_refuse('perdure_chain is append-only');
