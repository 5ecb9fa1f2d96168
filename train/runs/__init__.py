"""The trainer: the loop, what it reports, what ends it, and whose directory it is."""
