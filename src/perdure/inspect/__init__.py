"""Reading journals: what happened, what is open, whether it can be believed. Nothing in here ever writes to one."""
