"""`python -m anystep.cache_job` is `anystep-cache`."""

from anystep.cache_job.main import run

run()
