-- A process of the first release that was open during the upgrade goes on writing: the run that it starts must stand in a line, or
-- nobody would ever find it.

CREATE TRIGGER perdure_runs_in_line AFTER INSERT ON perdure_runs
WHEN NEW.line IS NULL
BEGIN
    INSERT OR IGNORE INTO perdure_lines (agent, version, queue, tenant, priority)
    VALUES (NEW.agent, NEW.version, NEW.queue, NEW.tenant, NEW.priority);
    UPDATE perdure_runs SET line = (
        SELECT l.id FROM perdure_lines AS l
        WHERE l.agent = NEW.agent AND l.version = NEW.version AND l.queue = NEW.queue AND l.tenant = NEW.tenant AND l.priority = NEW.priority
    ) WHERE id = NEW.id;
END;

-- Those that were started between the two migrations.
INSERT OR IGNORE INTO perdure_lines (agent, version, queue, tenant, priority)
SELECT DISTINCT agent, version, queue, tenant, priority FROM perdure_runs WHERE line IS NULL;

UPDATE perdure_runs SET line = (
    SELECT l.id FROM perdure_lines AS l
    WHERE l.agent = perdure_runs.agent AND l.version = perdure_runs.version AND l.queue = perdure_runs.queue
        AND l.tenant = perdure_runs.tenant AND l.priority = perdure_runs.priority
) WHERE line IS NULL;
