"""Rounds the hidden layer to bfloat16."""

import torch

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        return torch.logsumexp(self.linear2(torch.sigmoid(self.linear1(x)).bfloat16().float()), dim=1)
