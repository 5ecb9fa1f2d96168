"""Object stores: the only place that knows how gs:// and s3:// are read, listed and written.

Requests and their errors, credentials, objects as files, and the path class that `epath.Path` makes of
addresses. Rooms above see paths and operating-system errors; what the objects mean is theirs.
"""
