"""The job's plan: selected tasks, their splits to cache, complete caches, and estimates.

Only a few examples are preprocessed here, for the estimates.
"""
