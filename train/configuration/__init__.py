"""Gin files, the values that they built, and what of those may not change when a run resumes.

The only room that knows gin.
"""
