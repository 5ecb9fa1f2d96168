"""Answers to questions about data: the rows of a step, the steps of an example, changes of plans, statistics.

The answers are values; programs print them.
"""
