-- The last progress that an attempt under way has reported with `call.heartbeat`: a hint for the next attempt of the call,
-- and for people. It is no part of the journal. A row is replaced by the next progress, and deleted after the attempt has ended.
CREATE TABLE perdure_progress (
    run BIGINT NOT NULL REFERENCES perdure_runs (id),
    call BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    progress TEXT NOT NULL,
    at BIGINT NOT NULL,
    PRIMARY KEY (run, call)
) WITH (fillfactor = 50);
