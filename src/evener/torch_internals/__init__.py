"""Private names of torch, Python and other packages that Evener needs, with one file for each area.

Each file lists its names, says why no public name serves, and with which versions the names were tested. Modules that
import slowly, or need an optional package, are separate files. All other code imports private names from here. So if a
version of torch drops a name, one file needs a repair. tests/torch_internals/test_torch_names.py tests every name and
says which file to repair.
"""
