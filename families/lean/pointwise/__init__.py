"""The fused ops between GEMMs. Importing this loads no torch."""
