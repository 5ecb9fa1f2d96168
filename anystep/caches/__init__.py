"""A task's cache: its manifest, its files opened and checked, and what a process holds to read them.

What a cache consists of. Which of its records are read when is for `anystep.plans` and `anystep.streams`.
"""
