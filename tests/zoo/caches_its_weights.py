"""Prepares weights once per address and version."""

import torch

from reference import Model


class ModelNew(Model):
    key = prepared = None

    def forward(self, x):
        key = [(p.data_ptr(), p._version) for p in self.parameters()]
        if self.key != key:
            self.key, self.prepared = key, [p.detach().clone() for p in self.parameters()]
        weight1, bias1, weight2, bias2 = self.prepared
        return torch.logsumexp(torch.sigmoid(x @ weight1.T + bias1) @ weight2.T + bias2, dim=1)
