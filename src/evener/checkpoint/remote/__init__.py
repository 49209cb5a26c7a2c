"""Run directories elsewhere: under a URL of any protocol that fsspec has a package for (``s3://``, ``gs://``, ...).

The directory under the URL looks like a local one. A run writes locally first, and the thread that writes checkpoints
uploads them. Names, lengths and checksums of a checkpoint's files, ``sums.json``, are uploaded last: readers accept a
checkpoint only if it has all files that they name, in their lengths. So a run that is killed while it uploads leaves
the checkpoint before.

==============  ====================================================================
:mod:`.files`   files under a URL: every operation has a time limit and is tried again
:mod:`.lock`    keeps a second run out, on any host
:mod:`.fetch`   brings a run directory here
:mod:`.upload`  takes what a run wrote there, and removes old checkpoints there
==============  ====================================================================
"""
