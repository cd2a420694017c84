"""Leaves out the last 8 elements of the second bias."""

import torch

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        bias = torch.cat([self.linear2.bias[:-8], torch.zeros_like(self.linear2.bias[:8])])
        h = torch.sigmoid(self.linear1(x))
        return torch.logsumexp(h @ self.linear2.weight.T + bias, dim=1)
