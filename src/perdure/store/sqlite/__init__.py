"""The journal in one SQLite file, or in memory: the SQL dialect, and the code that only a file needs, not a server."""
