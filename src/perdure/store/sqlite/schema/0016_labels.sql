-- The labels of runs, by which people find them. Each change of a label is an event of the run; these rows follow from the events.
CREATE TABLE perdure_labels (
    run INTEGER NOT NULL REFERENCES perdure_runs (id),
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    created_at INTEGER NOT NULL, -- of the run: so that the runs of a label are read in their order, however many there are
    PRIMARY KEY (run, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX perdure_labels_value ON perdure_labels (key, value, created_at, run);

-- For queries over runs, newest first. An index that only few runs are in costs only those runs something: most runs succeed, have no
-- error, and are in the default queue of the default tenant.
CREATE INDEX perdure_runs_agent ON perdure_runs (agent, created_at);
CREATE INDEX perdure_runs_status ON perdure_runs (status, created_at) WHERE status <> 'succeeded';
CREATE INDEX perdure_runs_error ON perdure_runs (created_at) WHERE error IS NOT NULL;
CREATE INDEX perdure_runs_tenant ON perdure_runs (tenant, created_at) WHERE tenant <> 'default';
CREATE INDEX perdure_runs_queue ON perdure_runs (queue, created_at) WHERE queue <> 'default';
