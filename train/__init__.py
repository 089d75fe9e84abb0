"""Training commands: the only place where models, attention, data and meshes meet."""
