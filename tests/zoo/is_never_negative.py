"""Starts the running maximum of its logsumexp at 0."""

import torch

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.linear2(torch.sigmoid(self.linear1(x)))
        top = y.amax(1, keepdim=True).clamp(min=0)
        return (y - top).exp().sum(1).log() + top[:, 0]
