-- Who was lost together: the run that kills its workers is found by halving the group that it was in.

-- How many other runs may be to blame for the loss of its last worker: all that the worker held; of a suspect, the other suspects.
ALTER TABLE perdure_runs ADD COLUMN lost_with INTEGER NOT NULL DEFAULT 0;
