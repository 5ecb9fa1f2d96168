"""Unit tables: which records make each unit, where units are not simply a cache's records.

Surveys make them, and files beside the cache keep them. The order of units is the plan's.
"""
