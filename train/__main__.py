"""`python -m anystep.train` is `anystep-train`."""

from anystep.train.main import run

run()
