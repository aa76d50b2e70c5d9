"""Pure: told, never looks. No I/O, no clock, no randomness, no thread."""
