"""Some examples of a task at every stage, as text and as a page.

What is shown is what the cache job and the readers do, computed by their own code.
"""
