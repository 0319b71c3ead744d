"""Training: a step as a model, what it is fed, and what is saved of it."""
