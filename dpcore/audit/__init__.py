"""An audit: canary gradients go through the real step, and its releases give a lower bound on epsilon.

>>> from dpcore import methods
>>> from dpcore.audit import audit
>>> from dpcore.sampling import FixedOrderSampler
>>> sampler = FixedOrderSampler(dataset_size=200, batch_size=50)
>>> result = audit(methods.disk(lr=0.1, noise_multiplier=2.0), sampler, 8, delta=1e-5)
>>> result.lower_bound < result.claimed_epsilon
True
"""

from dpcore.audit.auditing import audit
from dpcore.audit.verdict import AuditResult
from dpcore.mechanism.loop import private_step

__all__ = ["AuditResult", "audit", "private_step"]
