"""All that the scheduler asks about memory. (Being filled in.)"""


class KVManager:
    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        raise NotImplementedError
