-- The unfinished runs, so that they are counted by status without a look at the finished ones, of which there may be millions.
-- No IN with three texts: SQLite would build a table in memory for it, at every change of a status.
CREATE INDEX perdure_runs_unfinished ON perdure_runs (line, status, attention)
WHERE status <> 'succeeded' AND status <> 'failed' AND status <> 'cancelled' AND specimen IS NULL;
