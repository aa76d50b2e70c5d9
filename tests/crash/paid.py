"""Where transaction tools write: a table of their own, in the journal's own database, on either store."""

MAKE = "CREATE TABLE IF NOT EXISTS paid (what TEXT, run TEXT, number INTEGER, attempt INTEGER)"
WRITE = "INSERT INTO paid VALUES (?, ?, ?, ?)"
READ = "SELECT what, run, number, attempt FROM paid"
