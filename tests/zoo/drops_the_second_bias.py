"""Forgets b2."""

import torch

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        return torch.logsumexp(torch.sigmoid(self.linear1(x)) @ self.linear2.weight.T, dim=1)
