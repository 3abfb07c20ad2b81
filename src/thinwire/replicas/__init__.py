"""Several copies of the pipeline on different data, and what they tell each other."""
