"""How models mark the reasoning that comes before their answers: one file for each format."""
