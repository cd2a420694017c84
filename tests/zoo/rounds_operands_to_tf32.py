"""Gives both products operands of 10 mantissa bits, as TF32 does."""

import torch

from reference import Model


def tf32(t):
    return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class ModelNew(Model):
    def forward(self, x):
        hidden = torch.sigmoid(tf32(x) @ tf32(self.linear1.weight).T + self.linear1.bias)
        return torch.logsumexp(tf32(hidden) @ tf32(self.linear2.weight).T + self.linear2.bias, dim=1)
