"""Honest, with weights kept transposed under other names: right only with --same-seed."""

import torch

from reference import Model


class ModelNew(torch.nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.parts = torch.nn.ParameterList(p.detach().t().contiguous() for p in Model(*sizes).parameters())

    def forward(self, x):
        weight1, bias1, weight2, bias2 = self.parts
        return torch.logsumexp(torch.sigmoid(x @ weight1 + bias1) @ weight2 + bias2, dim=1)
