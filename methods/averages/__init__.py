"""Which weights a step hands over."""
