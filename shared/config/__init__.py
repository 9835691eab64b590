"""What a run is: the config file, its schema, its overrides and the recipe's hash.

============= =======================================================================
schema        every section and field, with its documentation
document      YAML that remembers the line of every value
load          file, target and command line merged into one validated config
problems      validation errors as one line: where, what, nearest valid choice
recipe        the part that decides a run's numbers, and its hash
reference     the JSON Schema for editors and the Markdown reference
============= =======================================================================

``python -m shared.config --check FILE`` checks a file without training.
"""
