"""One self-contained submission file, made of the sources of the families that the shapes need."""
