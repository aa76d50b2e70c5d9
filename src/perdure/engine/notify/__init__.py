"""Notices for people: the text of a notice, and the ways to send it: a line in the log, and a signed webhook."""
