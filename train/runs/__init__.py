"""The trainer: the loop, what it reports, what ends it, and whose directory it is.

What a step computes is for `anystep.train.models`, what it is given for `anystep.train.datasets`.
"""
