"""Our data for SeqIO's own callers, and SeqIO's converters and metrics for our trainer.

Whoever has code for SeqIO finds here what takes its place.
"""
