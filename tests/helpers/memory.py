"""How much TensorFlow allocated in a run."""

import numpy as np


def peak_bytes(metadata):
    """Returns the largest number of bytes that were allocated at one time."""
    records = [
        (r.alloc_micros, r.alloc_bytes)
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
        for memory in node.memory
        for r in memory.allocation_records
    ]
    return int(np.max(np.cumsum([size for _, size in sorted(records)])))
