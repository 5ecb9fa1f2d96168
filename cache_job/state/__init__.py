"""The description of a job that workers get, and the files that they leave in its directory.

All state is in files, so that a later run of the job needs nothing else.
"""
