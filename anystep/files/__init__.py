"""Files and directories: reading within limits, writing whole or not at all, names, locks.

Paths, and the operating system's answers about them. Rooms above know the files' contents.
"""
