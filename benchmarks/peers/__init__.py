"""One engine per file, each run in its own process (and, if third-party, its own environment).

A file here imports the standard library, `benchmarks.protocol`, `benchmarks.workloads` and its
own engine; nothing of Octavo unless it is Octavo.
"""
