"""From names to registered tasks, what a cache must have in common with one, and mixtures in files.

The only room that knows SeqIO's registries.
"""
