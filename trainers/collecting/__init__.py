"""What takes the trainers' place in a run without any: complete rows are selected and written to files."""
