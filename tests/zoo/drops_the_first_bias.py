"""Forgets b1."""

import torch

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        return torch.logsumexp(self.linear2(torch.sigmoid(x @ self.linear1.weight.T)), dim=1)
