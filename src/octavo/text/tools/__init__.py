"""Tool calls: how models write them, one file for each format (`octavo.text.tools.base`)."""
