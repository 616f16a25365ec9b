"""The commands behind `rooflane`, one file for each kind of question; the work is done elsewhere."""
