"""Write one self-contained submission file from the families the shapes need."""
