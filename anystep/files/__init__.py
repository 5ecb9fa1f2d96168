"""Files and directories: reading within limits, writing whole or not at all, names, locks.

Whatever knows a path, or what the operating system says of one. What is in the files is for rooms above.
"""
