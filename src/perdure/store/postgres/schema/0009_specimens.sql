-- A specimen: a run that was exported from another journal and imported here, to be looked at. The triggers keep it as it was
-- imported, whatever the code above does: no worker claims it, and it takes no post.

-- At once as strong as the triggers need it: a lock that is raised later would deadlock with workers.
LOCK TABLE perdure_runs IN ACCESS EXCLUSIVE MODE;

-- JSON: which file it came from, when and by whom. NULL: a run of this journal.
ALTER TABLE perdure_runs ADD COLUMN specimen TEXT;

CREATE TRIGGER perdure_runs_specimen BEFORE UPDATE OF version, status, waiting_for, ready_at, seq, head, epoch, nonce, holder, lost, lost_with,
    crashes, error, updated_at, attention, specimen ON perdure_runs
FOR EACH ROW WHEN (OLD.specimen IS NOT NULL OR NEW.specimen IS NOT NULL)
EXECUTE FUNCTION perdure_refuse('a specimen stays as it was imported');

-- A specimen that is ready, or held, would be driven.
CREATE TRIGGER perdure_runs_specimen_rests BEFORE INSERT ON perdure_runs
FOR EACH ROW WHEN (NEW.specimen IS NOT NULL AND (NEW.ready_at IS NOT NULL OR NEW.holder IS NOT NULL))
EXECUTE FUNCTION perdure_refuse('a specimen is never driven');

CREATE FUNCTION perdure_check_specimen() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    imported TEXT;
BEGIN
    IF TG_TABLE_NAME = 'perdure_runs' THEN
        SELECT specimen INTO imported FROM perdure_runs WHERE run_id = split_part(NEW.run_id, '/', 1);
    ELSE
        SELECT specimen INTO imported FROM perdure_runs WHERE id = NEW.run;
    END IF;
    IF imported IS NOT NULL THEN
        RAISE EXCEPTION USING MESSAGE = TG_ARGV[0], ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END
$$;

-- No live run may join the family of a specimen: only an undo run could.
CREATE TRIGGER perdure_runs_specimen_family BEFORE INSERT ON perdure_runs
FOR EACH ROW WHEN (NEW.specimen IS NULL AND NEW.run_id LIKE '%/undo') EXECUTE FUNCTION perdure_check_specimen('a specimen is never driven');

CREATE TRIGGER perdure_inbox_specimen BEFORE INSERT ON perdure_inbox
FOR EACH ROW EXECUTE FUNCTION perdure_check_specimen('a specimen takes no post');

CREATE TRIGGER perdure_approvals_specimen BEFORE UPDATE ON perdure_approvals
FOR EACH ROW EXECUTE FUNCTION perdure_check_specimen('an approval of a specimen is never decided');
