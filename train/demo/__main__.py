"""`python -m anystep.train.demo` runs the demo."""

from anystep.train.demo.demo import run

run()
