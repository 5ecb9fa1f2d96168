"""Unit tables: which records make each unit, where units are not simply a cache's records.

Found by surveys, kept in files beside the cache. The order of units is the plan's.
"""
