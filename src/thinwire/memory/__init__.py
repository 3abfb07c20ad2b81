"""Memory: train a stage that does not fit, by recomputing and offloading what a plan says."""
