"""Names that torch and Python keep to themselves and Evener cannot do without, one purpose a file.

Each file says which names, why no public one does, and the versions it was tested with. Everything else imports from
here, so that a version of torch in which a name goes is repaired in one file.
tests/torch_internals/test_torch_names.py exercises each, and says which file to repair.
"""
