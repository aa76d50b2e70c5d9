-- A person may reopen a run that has failed or was cancelled: its row goes back to 'queued', and its journal goes on with `run_reopened`.
-- A run that has succeeded stays so, and nothing else changes the row of a finished run.
DROP TRIGGER perdure_runs_finished ON perdure_runs;
CREATE TRIGGER perdure_runs_finished BEFORE UPDATE OF seq, head, status, holder, ready_at ON perdure_runs
FOR EACH ROW WHEN (
    OLD.status IN ('succeeded', 'failed', 'cancelled')
    AND NOT (OLD.status <> 'succeeded' AND NEW.status = 'queued' AND NEW.seq > OLD.seq AND NEW.holder IS NULL)
)
EXECUTE FUNCTION perdure_refuse('a finished run takes nothing more');
-- How often the run was reopened in this database. A reader that follows all runs looks at such runs again, also after
-- their end.
ALTER TABLE perdure_runs ADD COLUMN reopened bigint NOT NULL DEFAULT 0;
