"""Greyhound: cross entropy and its gradient in one pass over the logits.

Public entry points:

* `greyhound.nn.functional.cross_entropy` and `greyhound.nn.CrossEntropyLoss`: a loss with autograd,
* `greyhound.nn.functional.chunked_linear_cross_entropy` and `greyhound.nn.LinearCrossEntropyLoss`: the projection that
  makes the logits too, a chunk of rows at a time; `chunked_linear_loss` for a loss of your own,
* `greyhound.distributed.vocab_parallel_cross_entropy`: the loss of logits whose columns are spread over the ranks of a
  process group, and `vocab_parallel_linear_cross_entropy` of a weight whose rows are,
* `greyhound.kernels.cross_entropy.cross_entropy_with_grad_kernel`: turns a logits buffer into its gradient in place.

Importing this package loads no compiler, creates no CUDA context and reads no environment variable.
"""

__version__ = "0.5.1"
