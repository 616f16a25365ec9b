"""Is it right: the gate, the promises, the stress inputs and the checks for tampering."""
