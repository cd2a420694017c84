"""Is wrong for a batch of two."""

from reference import Model


class ModelNew(Model):
    def forward(self, x):
        out = super().forward(x)
        return out.flip(0) if len(x) == 2 else out
