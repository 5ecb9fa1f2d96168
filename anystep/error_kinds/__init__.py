"""The table of error kinds: by subject, the exit code of each kind and one sentence about it for people.

Data stands here. The error itself is for `anystep.errors`; what one error expected, got and suggests stands
where it is raised. A kind has one exit code wherever it is raised: tests compare every raise with the table,
and write the tables in the documents from it.
"""
