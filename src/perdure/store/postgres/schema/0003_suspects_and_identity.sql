-- The column first: it takes the strongest lock on the table at once. A weaker one that is raised later would deadlock with workers.
-- Who was lost together: the run that kills its workers is found by halving the group that it was in.

-- How many other runs may be to blame for the loss of its last worker: all that the worker held; of a suspect, the other suspects.
ALTER TABLE perdure_runs ADD COLUMN lost_with BIGINT NOT NULL DEFAULT 0;

-- What a run's first event says of it and no later one changes stays in its row: which run it is, whose, and where its code was.
-- No release of perdure updates these columns, so that an old process that is still open is not disturbed.

CREATE TRIGGER perdure_runs_identity BEFORE UPDATE OF id, run_id, agent, tenant, actor, queue, target, input_digest, created_at, priority,
    parent, parent_call, parent_seq, depth ON perdure_runs
FOR EACH STATEMENT EXECUTE FUNCTION perdure_refuse('what its first event says of a run stays');
