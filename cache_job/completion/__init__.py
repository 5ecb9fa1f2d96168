"""The end of the job: manifests, files in their places, the marker; and how far it is meanwhile."""
