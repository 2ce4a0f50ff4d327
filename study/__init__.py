"""Many runs: what they are, how they are started, and what they say together."""
