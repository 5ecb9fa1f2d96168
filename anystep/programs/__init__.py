"""Shared parts of the command-line programs: flags, exit statuses, progress, HTML pages.

Nothing here is about data. The library itself prints nothing: programs show the progress that it reports.
"""
