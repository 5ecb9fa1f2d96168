"""Batches: what a plan says, read, transformed, converted, and made ahead of need.

Faces for other loaders stand here too. What decides a batch is the plan's.
"""
