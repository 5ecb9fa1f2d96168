"""The trainer: its loop, reports, signals, and the lock and the name of a run's directory.

The computation of a step belongs in `anystep.train.models`, its data in `anystep.train.datasets`.
"""
