"""The pure part of perdure: no I/O, no clock, no randomness, no threads. Every fact from outside is an argument."""
