"""Checkpoints of other programs, read and written leaf by leaf.

Every format is read into, and written from, the same named leaves: those of T5X's train state. Blocks of
arrays belong in `anystep.train.leaves`, training and its own checkpoints in `anystep.train.checkpoints`.
"""
