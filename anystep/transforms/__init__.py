"""What examples go through at reading, and the identity by which a plan knows it.

Functions of examples. Those of SeqIO tasks are in `anystep.tasks.reading`.
"""
