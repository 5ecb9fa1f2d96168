"""`make demo`: a run that is killed and resumed beside one that is not, and a page that compares them.

Uses the trainer as a user would; nothing imports it.
"""
