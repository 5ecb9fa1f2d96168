"""Transforms of examples at reading, and the identities by which plans know them.

These are functions of examples. The transforms of SeqIO tasks are in `anystep.tasks.reading`.
"""
