"""The plan: which unit of which task is in which row of which step, as a file and as arithmetic.

No record is read here.
"""
