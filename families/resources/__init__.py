"""The static kernel gate: registers, spills and occupancy of every shipped kernel."""
