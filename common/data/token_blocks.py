"""Training blocks over a stream of token ids.

This is not in token_map.py, because prepare_oscar.py uses that file without torch.
"""

import numpy as np
import torch
from torch.utils.data import Dataset


class TokenBlocks(Dataset):
    """Blocks of T token ids. Item i is an int64 tensor (T,); what does not fill a block at the end is left out."""

    def __init__(self, stream: np.ndarray, block_size: int):
        blocks = len(stream) // block_size
        self.blocks = stream[: blocks * block_size].reshape(blocks, block_size)  # (number of blocks, T), still on disk

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.blocks[index].astype(np.int64))
