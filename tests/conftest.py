"""One torch thread: several threads beside other processes are slower than one."""

import torch

torch.set_num_threads(1)
