"""Source shards to batches of checked examples.

Preprocessors run here and nowhere else in the job.
"""
