"""The batches of a running mechanism: who draws them, when, and which part is this process's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpcore.mechanism.saving import SavedMechanism


class DrawnBatches(SavedMechanism):
    """The draws of a run, each of which its account pays for first."""

    def draw(self) -> NDArray[np.int64]:
        """Return this process's examples of this step, after the account has agreed to pay for it.

        Secret where sampling is.
        """
        with self.turns.alone("draw"):
            if self.account is not None:
                self.account.before_draw(self.step)
            self.turns.drew(self.step)
            return self.share.indices(self.keys.sampling, self.step)

    def ahead(self, step: int) -> NDArray[np.int64] | None:
        """Return what the draw of a later step will give, to read it meanwhile; None where nobody has paid for it yet.

        It is no draw: that comes in its turn, and may give something else after a fork. As secret as `draw`.
        """
        with self.turns.alone("ahead"):
            unpaid = self.account is not None and not self.account.has_paid(step)
            return None if unpaid or step >= self.plan.steps else self.share.indices(self.keys.sampling, step)

    def first_example(self) -> int:
        """Return the place of this process's first example in the step's batch: 0 for the first process. Secret."""
        if self.peers.rank == 0:
            return 0
        return self.share.first(self.keys.sampling, self.step)
