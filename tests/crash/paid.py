"""The table into which transaction tools write: in the database of the journal, on either store."""

MAKE = "CREATE TABLE IF NOT EXISTS paid (what TEXT, run TEXT, number INTEGER, attempt INTEGER)"
WRITE = "INSERT INTO paid VALUES (?, ?, ?, ?)"
READ = "SELECT what, run, number, attempt FROM paid"
