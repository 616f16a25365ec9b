"""Shipped problem files; `rooflane problems` lists them. Candidates for them are in the folder beside."""
