"""Short, narrow sequences: the whole forward on the SM. Importing this loads no torch."""
