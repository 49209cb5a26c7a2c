"""Private names of torch, Python and other packages that Evener needs, with one file for each area.

Each file lists its names, says why no public name serves, and with which versions the names were tested. Modules that
import slowly, or need an optional package, are separate files. All other code imports private names from here. So if a
version of torch drops a name, one file needs a repair. The tests in tests/torch_internals try every name and say which
file to repair.
"""
