"""How each kind of module is read: refusals, weights as a baseline's, calls."""
