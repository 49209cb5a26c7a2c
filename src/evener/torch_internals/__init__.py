"""Names that torch and Python keep to themselves and Evener cannot do without, one area a file.

Each file says which names, why no public one does, and the versions they were tested with. What is slow to import, or
comes with a package that may be missing, has a file of its own. Everything else imports from here, so that a version
of torch in which a name goes is repaired in one file.
tests/torch_internals/test_torch_names.py exercises each, and says which file to repair.
"""
