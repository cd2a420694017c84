"""Is wrong in each third call."""

from reference import Model


class ModelNew(Model):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + (self.calls % 3 == 0)
