"""Communication between the ranks of a tensor-parallel engine. Models see a `base.Group` only."""
