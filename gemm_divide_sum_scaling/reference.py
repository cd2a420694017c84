"""The second problem, in plain PyTorch: matrix product, divide, sum, scale (KernelBench level 2, problem 14)."""

import torch
from torch import nn

batch_size = 1024
input_size = 8192
hidden_size = 8192
scaling_factor = 1.5


class Model(nn.Module):
    """``out[r] = scaling_factor * sum_h((x @ W.T)[r, h] / 2)``, kept as a column."""

    def __init__(self, input_size, hidden_size, scaling_factor):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size, input_size))
        self.scaling_factor = scaling_factor

    def forward(self, x):
        """``x`` (batch, input) -> (batch, 1)."""
        product = torch.matmul(x, self.weight.T)  # (batch, hidden)
        return torch.sum(product / 2, dim=1, keepdim=True) * self.scaling_factor


def get_inputs():
    """The arguments of ``forward``: ``x`` (batch, input), float32, uniform in [0, 1)."""
    return [torch.rand(batch_size, input_size)]


def get_init_inputs():
    """The arguments of ``Model``."""
    return [input_size, hidden_size, scaling_factor]
