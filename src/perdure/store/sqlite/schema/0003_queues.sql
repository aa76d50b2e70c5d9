-- Queues: lines of ready runs, whose turn it is, what workers serve, and rates.

-- All runs of one kind wait in one line, so that a worker looks at the head of each line that it serves and at nothing else.
CREATE TABLE perdure_lines (
    id INTEGER PRIMARY KEY,
    agent TEXT NOT NULL,
    version TEXT NOT NULL,
    queue TEXT NOT NULL,
    tenant TEXT NOT NULL,
    priority INTEGER NOT NULL,
    UNIQUE (agent, version, queue, tenant, priority)
) STRICT;

-- When each tenant had its last turn in a queue, by a count of all turns: clocks have no say in it.
CREATE TABLE perdure_turns (
    queue TEXT NOT NULL,
    tenant TEXT NOT NULL,
    turn INTEGER NOT NULL,
    PRIMARY KEY (queue, tenant)
) STRICT, WITHOUT ROWID;

CREATE INDEX perdure_turns_turn ON perdure_turns (turn);

ALTER TABLE perdure_runs ADD COLUMN line INTEGER REFERENCES perdure_lines (id);

INSERT INTO perdure_lines (agent, version, queue, tenant, priority)
SELECT DISTINCT agent, version, queue, tenant, priority FROM perdure_runs;

UPDATE perdure_runs SET line = (
    SELECT l.id FROM perdure_lines AS l
    WHERE l.agent = perdure_runs.agent AND l.version = perdure_runs.version AND l.queue = perdure_runs.queue
        AND l.tenant = perdure_runs.tenant AND l.priority = perdure_runs.priority
);

DROP INDEX perdure_runs_ready;
CREATE INDEX perdure_runs_line ON perdure_runs (line, ready_at) WHERE ready_at IS NOT NULL;

-- With the line, so that held runs are counted without touching their rows.
DROP INDEX perdure_runs_held;
CREATE INDEX perdure_runs_held ON perdure_runs (holder, line) WHERE holder IS NOT NULL;

ALTER TABLE perdure_workers ADD COLUMN serves TEXT NOT NULL DEFAULT '[]';
ALTER TABLE perdure_workers ADD COLUMN queues TEXT;

CREATE TABLE perdure_rates (
    key TEXT PRIMARY KEY,
    due INTEGER NOT NULL, -- when the line of starts would be empty if nobody else came
    paused_until INTEGER NOT NULL,
    seen_at INTEGER NOT NULL -- when somebody last took a place: tells a clock that was set back
) STRICT, WITHOUT ROWID;
