"""Batches: the plan's rows, read, transformed, converted, and made ahead of need.

Adapters for other loaders are here too. The plan decides what is in a batch.
"""
