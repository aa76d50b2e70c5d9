"""Reads journals: what happened, what is open, and is the journal intact? No module here writes to a journal."""
