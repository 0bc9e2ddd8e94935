"""Greyhound: cross entropy and its gradient in one pass over the logits.

Public entry points:

* `greyhound.nn.functional.cross_entropy` and `greyhound.nn.CrossEntropyLoss`: a loss with autograd,
* `greyhound.kernels.cross_entropy.cross_entropy_with_grad_kernel`: turns a logits buffer into its gradient in place.

Importing this package loads no compiler, creates no CUDA context and reads no environment variable.
"""

__version__ = "0.3.0"
