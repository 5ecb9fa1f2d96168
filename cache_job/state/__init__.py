"""What a job's workers need to know, and what they leave in its directory.

Files alone, so that whoever goes on needs nothing else.
"""
