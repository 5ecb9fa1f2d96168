"""Tasks that are there: `--module_import=anystep.tasks.glue`, and others (docs/catalogue.md).

A module registers its tasks when it is imported. Caches know them by their code, which does not change.
"""
