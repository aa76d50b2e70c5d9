-- How long the lease of a worker lasts by the worker's own setting (µs). Other processes may have another setting, and must not
-- count the worker as silent too early. NULL: a worker of a release that did not record it.
ALTER TABLE perdure_workers ADD COLUMN lease_us INTEGER;
