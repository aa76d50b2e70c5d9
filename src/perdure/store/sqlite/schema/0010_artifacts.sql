-- Artifacts: large bytes that tools save and pass on by a pointer. The pointer has only the name; where the bytes lie is known here alone.

-- A row is there before the first byte is written, so that no byte lies anywhere without a row that leads to it.
CREATE TABLE perdure_artifacts (
    id INTEGER PRIMARY KEY,
    artifact TEXT NOT NULL UNIQUE CHECK (length(artifact) = 32), -- in a pointer: perdure:artifact/…
    run_id TEXT NOT NULL, -- the run whose call saved it; not its key, since another family may use it for longer than the run exists
    tenant TEXT NOT NULL,
    call INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('saving', 'saved', 'deleting')), -- deleting: no run uses it, and its bytes are being deleted
    place TEXT, -- the URL of the folder or bucket; NULL: the bytes are in perdure_artifact_chunks
    object TEXT, -- its name in that place
    sha256 BLOB CHECK (length(sha256) = 32),
    size INTEGER,
    content_type TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    CHECK (state <> 'saved' OR sha256 IS NOT NULL AND size IS NOT NULL)
) STRICT;

CREATE INDEX perdure_artifacts_run ON perdure_artifacts (run_id);
CREATE INDEX perdure_artifacts_deleting ON perdure_artifacts (id) WHERE state = 'deleting';

CREATE TABLE perdure_artifact_chunks (
    artifact INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (artifact, number)
) STRICT;

-- Which families may open an artifact, by the key of their root: the family that saved it, and families that got it with their input.
-- An artifact that no family uses any more is deleted.
CREATE TABLE perdure_artifact_uses (
    run INTEGER NOT NULL,
    artifact INTEGER NOT NULL,
    PRIMARY KEY (run, artifact)
) STRICT, WITHOUT ROWID;

CREATE INDEX perdure_artifact_uses_artifact ON perdure_artifact_uses (artifact);

CREATE TRIGGER perdure_artifacts_stay BEFORE UPDATE OF id, artifact, run_id, tenant, call, attempt, place, object, sha256, size, content_type,
    created_at ON perdure_artifacts
WHEN OLD.state <> 'saving'
BEGIN
    SELECT raise(ABORT, 'a saved artifact does not change');
END;

CREATE TRIGGER perdure_artifacts_no_delete BEFORE DELETE ON perdure_artifacts
WHEN OLD.state = 'saved'
BEGIN
    SELECT raise(ABORT, 'an artifact stays with the runs that use it');
END;

CREATE TRIGGER perdure_artifact_chunks_no_update BEFORE UPDATE ON perdure_artifact_chunks
BEGIN
    SELECT raise(ABORT, 'a saved artifact does not change');
END;

CREATE TRIGGER perdure_artifacts_open BEFORE INSERT ON perdure_artifacts
WHEN EXISTS (SELECT 1 FROM perdure_moved)
BEGIN
    SELECT raise(ABORT, 'this journal was moved: see perdure_moved');
END;
