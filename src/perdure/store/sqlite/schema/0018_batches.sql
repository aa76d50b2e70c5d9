-- Bulk operations: what a person has ordered for many runs with one command. The event of each run names its batch. A batch that has
-- not ended was interrupted, and the same command goes on with it.
CREATE TABLE perdure_batches (
    batch TEXT PRIMARY KEY,
    verb TEXT NOT NULL,
    query TEXT, -- as it was typed; its relative times count from `at`. NULL: the runs were named one by one
    given TEXT NOT NULL, -- JSON: the other arguments and options
    by TEXT NOT NULL,
    at INTEGER NOT NULL,
    ended_at INTEGER
) STRICT;

CREATE INDEX perdure_batches_interrupted ON perdure_batches (verb) WHERE ended_at IS NULL;
