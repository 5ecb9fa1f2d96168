"""A task's cache: its manifest, checks of its files, and the pool of open files and records.

These modules know what a cache consists of. The plan and the streams decide when its records are read:
`anystep.plans`, `anystep.streams`.
"""
