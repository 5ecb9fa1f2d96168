"""Beam's runners: their options on our command line, pipelines for them, and their failures.

Nothing here knows what the pipeline does; nothing else in the job knows which runner it has.
"""
