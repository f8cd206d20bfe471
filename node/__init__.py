"""The daemon: performs what the protocol machines decide, on real or in-memory seams."""
