"""The right values in another dtype."""

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x).double()
