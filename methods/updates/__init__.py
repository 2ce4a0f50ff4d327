"""How the gradient of an update is formed."""
