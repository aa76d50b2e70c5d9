-- A specimen: a run that was exported from another journal and imported here, to be looked at. The triggers keep it as it was
-- imported, whatever the code above does: no worker claims it, and it takes no post.

-- JSON: which file it came from, when and by whom. NULL: a run of this journal.
ALTER TABLE perdure_runs ADD COLUMN specimen TEXT;

CREATE TRIGGER perdure_runs_specimen BEFORE UPDATE OF version, status, waiting_for, ready_at, seq, head, epoch, nonce, holder, lost, lost_with,
    crashes, error, updated_at, attention, specimen ON perdure_runs
WHEN OLD.specimen IS NOT NULL OR NEW.specimen IS NOT NULL
BEGIN
    SELECT raise(ABORT, 'a specimen stays as it was imported');
END;

-- A specimen that is ready, or held, would be driven. No live run may join the family of a specimen: only an undo run could.
CREATE TRIGGER perdure_runs_specimen_rests BEFORE INSERT ON perdure_runs
WHEN NEW.specimen IS NOT NULL AND (NEW.ready_at IS NOT NULL OR NEW.holder IS NOT NULL)
    OR NEW.specimen IS NULL AND NEW.run_id LIKE '%/undo'
        AND EXISTS (SELECT 1 FROM perdure_runs WHERE run_id = substr(NEW.run_id, 1, instr(NEW.run_id, '/') - 1) AND specimen IS NOT NULL)
BEGIN
    SELECT raise(ABORT, 'a specimen is never driven');
END;

CREATE TRIGGER perdure_inbox_specimen BEFORE INSERT ON perdure_inbox
WHEN (SELECT specimen FROM perdure_runs WHERE id = NEW.run) IS NOT NULL
BEGIN
    SELECT raise(ABORT, 'a specimen takes no post');
END;

CREATE TRIGGER perdure_approvals_specimen BEFORE UPDATE ON perdure_approvals
WHEN (SELECT specimen FROM perdure_runs WHERE id = OLD.run) IS NOT NULL
BEGIN
    SELECT raise(ABORT, 'an approval of a specimen is never decided');
END;
