"""A right candidate for each shipped problem, matched by its file's stem."""
