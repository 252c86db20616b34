"""Tools of the repository: reports and generated pages. Not part of the package."""
