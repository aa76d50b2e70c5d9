"""The page about one run: its status with the reason, what is done, what is in doubt, and which commands to type."""
