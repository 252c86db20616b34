"""vLLM's `vllm.utils`, as far as scripts use it."""

import uuid

from octavo.utils.argparse_utils import FlexibleArgumentParser as FlexibleArgumentParser


def random_uuid() -> str:
    """A random request id: 16 hexadecimal digits."""
    return uuid.uuid4().hex[:16]
