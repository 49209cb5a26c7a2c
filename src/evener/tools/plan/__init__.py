"""Predicts what a run costs on machines that are not at hand.

================  ================================================================
``cluster``       the machines of a plan, as plain data
``cluster_file``  reads them from a TOML file
``catalogue``     cards and links by name, and units of latency and bandwidth
``topology``      the links of ``nvidia-smi topo -m``, and the best ring over them
================  ================================================================
"""
