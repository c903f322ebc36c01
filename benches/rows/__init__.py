"""The rows of the table, one file each."""
