"""What command-line programs share: flags and their end, progress, pages of HTML.

Nothing that is about data. The library itself is silent: it reports progress to whoever shows it.
"""
