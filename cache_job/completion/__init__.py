"""The end of the job: manifests, files moved to their places, the marker; and progress meanwhile.

Caches are made here of the shuffle's files, or of the source's own files where they are.
"""
