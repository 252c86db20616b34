"""One engine per file, each run in a process (and, for others' engines, an environment) of its own.

A file here imports the standard library, `benchmarks.protocol`, `benchmarks.workloads` and its
own engine; nothing of Octavo unless it is Octavo.
"""
