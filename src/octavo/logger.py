"""vLLM's `vllm.logger`: a name of the standard library's loggers."""

import logging


def init_logger(name: str) -> logging.Logger:
    """The logger called `name`; Octavo's own are below `octavo` (`octavo.log`)."""
    return logging.getLogger(name)
