"""PyTorch operators of Greyhound: schemas, implementations, fakes and autograd rules, in the namespace `greyhound`."""
