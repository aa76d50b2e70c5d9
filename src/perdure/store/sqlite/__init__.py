"""The journal in one SQLite file, or in memory: the SQL dialect, and code that a file needs and a server does not."""
