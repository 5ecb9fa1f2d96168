"""From names to registered tasks and their caches; fingerprints of tasks, and mixtures in files.

The only room that looks into SeqIO's registries.
"""
