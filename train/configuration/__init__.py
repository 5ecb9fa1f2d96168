"""Gin files, the values of the objects built from them, and the check of these values when a run resumes.

No other room imports gin.
"""
