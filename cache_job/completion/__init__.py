"""The end of the job: manifests, files in their places, the marker; and how far the job is meanwhile.

What makes a cache of what the shuffle left, and what describes files as they are.
"""
