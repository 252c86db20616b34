"""What fits: a model's memory on a device, before either is there.

The sums are the engine's own (`models.loader.Outline`, `runner.kv_cache`, `runner.sizing`,
`runner.step_memory`); what an engine measures is estimated here, and marked.
"""
