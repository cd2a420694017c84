"""The problem, in plain PyTorch: linear, sigmoid, linear, logsumexp (KernelBench level 2, problem 45)."""

import torch
from torch import nn

batch_size = 16384
input_size = 2048
hidden_size = 4096
output_size = 1024


class Model(nn.Module):
    """``out[i] = log(sum_j exp(y[i, j]))`` with ``y = sigmoid(x @ W1.T + b1) @ W2.T + b2``."""

    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.linear1 = nn.Linear(input_size, hidden_size)
        self.linear2 = nn.Linear(hidden_size, output_size)

    def forward(self, x):
        """``x`` (batch, input) -> (batch)."""
        hidden = torch.sigmoid(self.linear1(x))  # (batch, hidden)
        return torch.logsumexp(self.linear2(hidden), dim=1)


def get_inputs():
    """The arguments of ``forward``: ``x`` (batch, input), float32, uniform in [0, 1)."""
    return [torch.rand(batch_size, input_size)]


def get_init_inputs():
    """The arguments of ``Model``."""
    return [input_size, hidden_size, output_size]
