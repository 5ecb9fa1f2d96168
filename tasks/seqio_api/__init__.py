"""Our data for SeqIO's own callers, and SeqIO's converters and metrics for our trainer.

Code written for SeqIO finds the replacements here. Registration and reading of tasks belong elsewhere.
"""
