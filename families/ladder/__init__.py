"""The ladders: a matrix product and a reduction from naive to the hardware's pace, one idea a rung."""
