"""Raw helpers: checks, allocation and the launch, without autograd."""
