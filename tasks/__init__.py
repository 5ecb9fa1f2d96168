"""What is learned: SeqIO tasks and mixtures, their sources, preprocessors, vocabularies and metrics.

Tasks stand in modules of their own, which register them when they are imported (`--module_import`).
"""
