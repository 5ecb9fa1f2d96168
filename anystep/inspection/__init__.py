"""Questions about data: what a step was given, when an example is seen, how the data changed, statistics.

Answers as values; programs print them.
"""
