"""Cross entropy of logits that already exist, and its gradient, in one pass."""
